"""Metamorphic relations of gated_residual_next_rmsnorm."""
