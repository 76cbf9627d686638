"""The activation of a gated MLP: an activated gate times what stands beside it in the row."""

from traceproof.ops.record import OpType

OP = OpType(family="activation")
