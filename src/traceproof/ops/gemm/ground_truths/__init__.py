"""Ground truths of gemm, one file per source."""
