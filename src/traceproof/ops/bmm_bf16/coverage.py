"""The axes of bmm_bf16."""

from traceproof.ops.common.coverage import ROWS_AND_SCALE

SPACE = ROWS_AND_SCALE
