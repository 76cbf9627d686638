"""Ground truths of gqa_paged, one file per source."""
