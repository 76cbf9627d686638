"""The axes of gated_residual_next_rmsnorm."""

from traceproof.ops.common.coverage import ROWS_AND_SCALE

SPACE = ROWS_AND_SCALE
