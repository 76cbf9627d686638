"""Rows of fp8 values times a scale per block."""

from traceproof.ops.record import OpType

OP = OpType(family="quantisation")
