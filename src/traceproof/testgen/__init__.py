"""Writes reference tests into a dataset: a file per definition, and a conftest.py."""
