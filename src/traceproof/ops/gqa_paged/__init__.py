"""Grouped-query attention over a paged cache."""

from traceproof.ops.record import OpType

OP = OpType(family="gqa", long=True, staged=True)
