"""Ground truths of dequantize_fp8, one file per source."""

from traceproof.ops.adapter import signature

ROWS = signature("q scale -> y")
