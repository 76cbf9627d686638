"""Mamba2's selective state update."""

from traceproof.ops.record import OpType

OP = OpType(family="mamba", staged=True)
