"""Judges kernels that users wrote for a definition: read, called isolated, judged; a certificate is the result."""
