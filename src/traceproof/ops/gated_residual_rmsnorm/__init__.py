"""Metamorphic relations of gated_residual_rmsnorm."""
