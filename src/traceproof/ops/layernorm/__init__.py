"""LayerNorm over the last axis, plain or quantised to fp8 by one scale."""

from traceproof.ops.record import OpType

OP = OpType(family="norm")
