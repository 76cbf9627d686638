"""Metamorphic relations of rmsnorm."""
