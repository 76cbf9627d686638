"""A batch of products of bfloat16 matrices."""

from traceproof.ops.record import OpType

OP = OpType(family="product")
