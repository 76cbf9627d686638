"""Bins of a histogram of errors, for who counts and who draws them; no torch here."""

OCTAVES = (-16, 8)  # the first bin holds all shares below 2^-16, the last one all from 2^7
