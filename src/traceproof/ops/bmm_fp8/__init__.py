"""A batch of products of fp8 matrices with one scale each."""

from traceproof.ops.record import OpType

OP = OpType(family="product")
