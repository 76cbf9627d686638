"""Ground truths of dsa_paged, one file per source."""
