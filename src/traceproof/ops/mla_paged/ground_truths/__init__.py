"""Ground truths of mla_paged, one file per source."""
