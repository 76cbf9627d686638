"""Attention of one request over keys and values in one piece."""

from traceproof.ops.record import OpType

OP = OpType(family="attention", kin="single", compiles_late=("torch",), coupled=True)
