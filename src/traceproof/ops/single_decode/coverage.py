"""The axes of single_decode."""

from traceproof.ops.common.coverage import ROWS_AND_SCALE

SPACE = ROWS_AND_SCALE
