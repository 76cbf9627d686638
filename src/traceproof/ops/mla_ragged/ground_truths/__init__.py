"""Ground truths of mla_ragged, one file per source."""
