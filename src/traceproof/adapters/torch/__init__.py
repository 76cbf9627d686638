"""Adapters to PyTorch; api.py holds its API table."""
