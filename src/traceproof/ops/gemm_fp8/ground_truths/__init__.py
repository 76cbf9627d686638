"""Ground truths of gemm_fp8, one file per source."""

from traceproof.ops.adapter import signature

PRODUCT = signature("a b a_scale b_scale -> out", rows="a")
