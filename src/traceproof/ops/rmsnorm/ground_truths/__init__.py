"""Ground truths of rmsnorm, one file per source."""
