"""Metamorphic relations of quantize_fp8."""
