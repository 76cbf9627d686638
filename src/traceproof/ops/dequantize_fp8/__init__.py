"""Metamorphic relations of dequantize_fp8."""
