"""Metamorphic relations: what must hold of a reference's outputs without knowing the right ones."""
