"""Attention of one query over the keys and values of its request."""

from traceproof.ops.record import OpType

OP = OpType(family="attention", kin="single", compiles_late=("torch",), coupled=True)
