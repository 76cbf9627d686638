"""Laws of causal_conv1d."""

from traceproof.ops.common.laws import BATCH, permuted
from traceproof.ops.laws import Law

CHANNELS = {"weight": 0, "x": 1, "conv_state": 1, "bias": 0}

LAWS = (*BATCH, Law("channels permuted", permuted(CHANNELS, 1)))
