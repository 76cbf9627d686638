"""Ground truths of gdn, one file per source."""
