"""Bins of the histogram of errors, for metrics and pages; imports no torch."""

OCTAVES = (-16, 8)  # the first bin holds all shares below 2^-16, the last one all from 2^7
