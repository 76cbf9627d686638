"""Models: the bundled ones, and what was read of a model: its modules and kernel calls."""
