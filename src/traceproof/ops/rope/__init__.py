"""Rotary position embedding."""

from traceproof.ops.record import OpType

OP = OpType(family="rope")
