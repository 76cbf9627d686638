"""Environments of stacks: building them, their CUDA toolkit, what they can import, their packages' files."""
