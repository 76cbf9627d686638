"""Gate functions of recurrent layers, in the dtype given."""

from __future__ import annotations

from traceproof.lazy import torch

# A float32 state loses some 4e-8 of itself in the baseline. With lg2.approx and ex2.approx at their documented
# worst
# (2**-22), all errors of one sign, over 16 tokens, it loses up to 67 times that (tests/test_ops_gdn.py). A state
# kept in bfloat16 or multiplied in TF32 loses 10,000 times as much.
FAST_EXP_FACTOR = 100.0
FAST_EXP = "hardware exponentials and logarithms lose a few float32 roundings more than the library's"


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), without overflow for large x and without loss for small ones."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def plain_softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) as kernels write it: small results lose their last digits to the 1; x itself above 20."""
    return torch.where(x > 20, x, torch.log(1 + torch.exp(x.clamp_max(20))))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))
