"""What the bits of ground truths' kernels depend on, and scripts that show it without this project."""
