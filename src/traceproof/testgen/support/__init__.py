"""Modules that are written beside generated tests; some stand there in the place of the package's own."""
