"""Environments of stacks: building them, their CUDA toolkit, what they can import, and their packages as files."""
