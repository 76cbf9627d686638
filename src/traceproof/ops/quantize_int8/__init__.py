"""Metamorphic relations of quantize_int8."""
