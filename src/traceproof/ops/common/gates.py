"""Gate functions of recurrent layers, in the dtype given."""

from __future__ import annotations

import torch

FAST_EXP_FACTOR = 16.0
FAST_EXP = "hardware exponentials of the gates lose a few float32 roundings more than the library's"


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), without overflow for large x and without loss for small ones."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))
