"""Grouped-query attention over ragged keys and values."""

from traceproof.ops.record import OpType

OP = OpType(family="gqa", kin="attention", staged=True)
