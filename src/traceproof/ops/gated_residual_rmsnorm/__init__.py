"""A residual and an RMS norm of a branch, each times a gain per channel, added."""

from traceproof.ops.record import OpType

OP = OpType(family="norm")
