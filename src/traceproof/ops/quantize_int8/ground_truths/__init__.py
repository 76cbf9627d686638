"""Ground truths of quantize_int8, one file per source."""

from traceproof.ops.adapter import signature

ROWS = signature("x -> q scale", rows="x")
