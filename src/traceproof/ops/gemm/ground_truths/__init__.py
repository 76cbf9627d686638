"""Ground truths of gemm, one file per source."""

from traceproof.ops.adapter import signature

PRODUCT = signature("A B -> C", rows="A")
