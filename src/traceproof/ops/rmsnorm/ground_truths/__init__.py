"""Ground truths of rmsnorm, one file per source."""

from traceproof.ops.adapter import signature

NORM = signature("hidden_states weight -> output", rows="hidden_states")
FUSED_ADD = signature("hidden_states residual weight -> output residual_out", rows="hidden_states")
EITHER = signature("hidden_states weight [residual] -> output residual_out", rows="hidden_states")
