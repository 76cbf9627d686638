"""Ground truths of rope, one file per source."""
