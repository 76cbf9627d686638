"""Ground truths of bmm_fp8, one file per source."""

from traceproof.ops.adapter import signature

PRODUCT = signature("A B A_scale B_scale [dtype] -> C")
