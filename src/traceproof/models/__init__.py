"""Models: the bundled ones, and what was read of one: its modules and the kernel calls they make."""
