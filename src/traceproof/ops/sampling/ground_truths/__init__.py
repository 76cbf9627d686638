"""Ground truths of sampling, one file per source."""
