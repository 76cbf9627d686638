"""The axes of rmsnorm_sigmoid_gate."""

from traceproof.ops.common.coverage import ROWS_AND_SCALE

SPACE = ROWS_AND_SCALE
