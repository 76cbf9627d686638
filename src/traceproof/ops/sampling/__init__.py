"""Sampling of tokens after top-k and top-p filters."""

from traceproof.ops.record import OpType

OP = OpType(family="sampling", long=True, coupled=True)
