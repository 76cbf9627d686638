"""Judging kernels that somebody wrote for a definition: read, run shut in, judged, and a certificate of it."""
