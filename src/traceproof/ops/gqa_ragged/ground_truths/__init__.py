"""Ground truths of gqa_ragged, one file per source."""
