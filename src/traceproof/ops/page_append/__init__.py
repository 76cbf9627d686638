"""New keys and values written to their places in a paged cache."""

from traceproof.ops.record import OpType

OP = OpType(family="attention", coupled=True)
