"""Adapters to SGLang; api.py holds its API table."""
