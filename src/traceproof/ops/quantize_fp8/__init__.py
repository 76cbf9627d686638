"""Rows quantised to fp8 (e4m3), with a scale per block."""

from traceproof.ops.record import OpType

OP = OpType(family="quantisation")
