"""Ground truths of gemm_bf16, one file per source."""

from traceproof.ops.adapter import signature

PRODUCT = signature("A B -> C")
BIASED = signature("A B [bias] -> C")
