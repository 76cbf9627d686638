"""Metamorphic relations of rmsnorm_sigmoid_gate."""
