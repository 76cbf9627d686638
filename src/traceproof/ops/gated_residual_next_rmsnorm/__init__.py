"""A gated residual sum, and the RMS norm of it that the next layer reads."""

from traceproof.ops.record import OpType

OP = OpType(family="norm")
