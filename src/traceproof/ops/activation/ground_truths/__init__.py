"""Ground truths of activation, one file per source."""
