"""Mixture of experts: routing and the experts' two products."""

from traceproof.ops.record import OpType

OP = OpType(family="moe", long=True)
