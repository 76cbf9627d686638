"""A product of bfloat16 matrices, C = A @ B, with or without a bias."""

from traceproof.ops.record import OpType

OP = OpType(family="product")
