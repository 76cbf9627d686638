"""Repositories at a commit: running git, cloning, checking out."""
