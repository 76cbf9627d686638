"""Ground truths of mamba_ssu, one file per source."""
