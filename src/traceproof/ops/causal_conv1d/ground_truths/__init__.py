"""Ground truths of causal_conv1d, one file per source."""

from traceproof.ops.adapter import signature

ROWS = signature("x weight [bias] -> output", rows="x")
STEP = signature("x conv_state weight [bias] -> output new_state", rows="x")
