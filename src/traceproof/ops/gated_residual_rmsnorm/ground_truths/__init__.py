"""Ground truths of gated_residual_rmsnorm, one file per source."""

from traceproof.ops.adapter import signature

GATED = signature("branch residual [weight] alpha beta eps gain_center -> output", rows="branch")
