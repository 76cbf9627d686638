"""Rules for Triton kernels and their tests, by reading their syntax trees."""
