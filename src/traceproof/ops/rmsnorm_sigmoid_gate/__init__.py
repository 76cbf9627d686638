"""An RMS norm without a weight, times the sigmoid of a gate."""

from traceproof.ops.record import OpType

OP = OpType(family="norm")
