"""A causal convolution per channel with SiLU after it: over a sequence, or one step with a state."""

from traceproof.ops.record import OpType

OP = OpType(family="convolution")
