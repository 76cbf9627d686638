"""A matrix product with a transposed right side."""

from traceproof.ops.record import OpType

OP = OpType(family="gemm", long=True)
