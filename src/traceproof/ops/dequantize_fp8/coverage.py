"""The axes of dequantize_fp8."""

from traceproof.ops.common.coverage import ROWS_AND_SCALE

SPACE = ROWS_AND_SCALE
