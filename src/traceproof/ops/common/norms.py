"""Norms in the dtype given."""

import torch


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows over the root of their mean square, x / sqrt(mean(x^2) + eps), over the last axis."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
