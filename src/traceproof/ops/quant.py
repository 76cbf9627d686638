"""Quantised number formats: block scales, fp8, fp4, and what they cost. Shared by the ops and their tests."""

from __future__ import annotations

from collections.abc import Callable

from traceproof.lazy import torch

Rounding = Callable[["torch.Tensor"], "torch.Tensor"]

FP8_MAX = 448.0
FP8_BITS_RMS = 107.24  # RMS of fp8 values whose bit patterns are uniform, as `Draw.bits` makes them
BLOCK = 128  # fp8 block scale: weights share a scale over 128 x 128, activations over 1 x 128

FP4_BLOCK = 16  # nvfp4: 16 neighbours share an e4m3 scale
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; bit 3 is the sign


def scale_blocks(rows: torch.Tensor, scales: torch.Tensor, *, height: int, width: int = BLOCK) -> torch.Tensor:
    """Multiply a matrix by its block scales: [R, C] times [R / height, C / width], in the matrix's dtype.

    Raises RuntimeError: the blocks do not tile the matrix.
    """
    blocks = rows.view(scales.shape[0], height, scales.shape[1], width)
    return (blocks * scales.to(rows.dtype)[:, None, :, None]).view(rows.shape)


def exact(values: torch.Tensor) -> torch.Tensor:
    """No rounding at all."""
    return values


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, and widen again to the dtype given."""
    return values.to(torch.bfloat16).to(values.dtype)


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn as kernels do, saturating at +-448, and widen again to the dtype given."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(values.dtype)


def requantise_fp8(values: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """What is left of `values` after fp8 with a scale, amax / 448, for each `block` of the last axis."""
    blocks = _in_blocks(values, block)
    scale = blocks.abs().amax(-1, keepdim=True) / FP8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (to_fp8(blocks / scale) * scale).reshape(values.shape)


def _in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // block, block)
