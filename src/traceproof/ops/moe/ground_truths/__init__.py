"""Ground truths of moe, one file per source."""
