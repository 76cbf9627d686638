"""Rows quantised to int8, with a scale per block."""

from traceproof.ops.record import OpType

OP = OpType(family="quantisation")
