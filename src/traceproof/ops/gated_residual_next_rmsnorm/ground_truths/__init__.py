"""Ground truths of gated_residual_next_rmsnorm, one file per source."""

from traceproof.ops.adapter import signature

GATED = signature(
    "branch residual next_weight [post_weight] alpha beta post_eps next_eps next_gain_center [post_gain_center]"
    " -> residual_out ffn_input",
    rows="branch",
)
