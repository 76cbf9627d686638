"""Ground truths of gemm, one file per source."""

from __future__ import annotations

from traceproof.ops.adapter import signature

PRODUCT = signature("A B -> C", rows="A")
