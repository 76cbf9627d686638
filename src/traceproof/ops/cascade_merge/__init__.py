"""Partial attention results, each with the base-2 logarithm of its sum, merged into one."""

from traceproof.ops.record import OpType

OP = OpType(family="attention")
