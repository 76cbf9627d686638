"""Adapters to Flash Linear Attention; api.py holds its API table."""
