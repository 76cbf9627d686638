"""A product of fp8 matrices with scales per block."""

from traceproof.ops.record import OpType

OP = OpType(family="product")
