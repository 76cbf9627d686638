"""Bringing what was proved to a dataset: what is verified, pull requests of it, and the push to a hub."""
