"""The report site: static pages about a finished run, which load nothing from elsewhere."""
