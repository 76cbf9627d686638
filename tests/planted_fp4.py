"""What nvfp4 leaves of values: how a kernel that requantises its activations computes."""

from __future__ import annotations

from itertools import pairwise

import torch

from traceproof.ops.quant import FP4_BLOCK, FP4_VALUES, FP8_MAX, to_fp8

FP4_MAX = 6.0
FP4_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(FP4_VALUES))


def to_fp4(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 value, saturating at +-6; of two equally near ones the one of even code."""
    magnitude = values.abs().clamp(max=FP4_MAX)
    upper = torch.zeros_like(magnitude, dtype=torch.int64)
    for code, midpoint in enumerate(FP4_MIDPOINTS):
        # between codes n and n + 1 a tie goes to the even one: up if n is odd
        upper += (magnitude >= midpoint) if code % 2 else (magnitude > midpoint)
    table = torch.tensor(FP4_VALUES, dtype=values.dtype, device=values.device)
    return torch.copysign(table[upper], values)


def requantise_fp4(values: torch.Tensor) -> torch.Tensor:
    """What is left of `values` after nvfp4: blocks of 16 with an e4m3 scale under one float32 scale for all.

    Values made of e2m1 codes and powers of two, with a 6 in every block, come back unchanged; normal ones lose
    about a tenth of their RMS.
    """
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // FP4_BLOCK, FP4_BLOCK)
    peak = blocks.abs().amax(-1, keepdim=True)
    largest = float(peak.max()) if peak.numel() else 0.0
    whole = largest / (FP4_MAX * FP8_MAX) if largest > 0 else 1.0
    scale = to_fp8(peak / (FP4_MAX * whole)) * whole
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (to_fp4(blocks / scale) * scale).reshape(values.shape)
