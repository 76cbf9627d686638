"""Adapters to FlashInfer; api.py holds its API table."""
