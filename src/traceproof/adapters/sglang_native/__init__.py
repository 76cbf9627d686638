"""Adapters to SGLang's native forms: PyTorch code beside its kernels, which runs on a CPU too."""
