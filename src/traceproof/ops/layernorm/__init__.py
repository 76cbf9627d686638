"""Metamorphic relations of layernorm."""
