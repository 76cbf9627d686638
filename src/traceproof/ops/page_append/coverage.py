"""The axes of page_append."""

from traceproof.ops.common.coverage import ROWS_AND_SCALE

SPACE = ROWS_AND_SCALE
