"""Grouped-query attention over a paged cache."""

from traceproof.ops.record import OpType

OP = OpType(family="gqa", kin="attention", long=True, staged=True)
