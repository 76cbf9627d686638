"""Figures of one comparison, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from traceproof.judge.specification import Row

WORST = 5


def metrics(actual: torch.Tensor, expected: torch.Tensor, row: Row) -> dict[str, Any]:
    """Errors of `actual` against `expected` (float64, same shape), over the positions where both are finite.

    max_abs, mean_abs, max_rel, mean_rel, cosine, mse, hit_ratio (of `row`, over all positions), worst (the
    top 5 positions by absolute error: index, actual, expected). Figures that no position supports are None.
    """
    whole = all_finite(actual) and all_finite(expected)
    # Mostly there is nothing to leave out, and looking for it position by position costs more than the figures do.
    if whole:
        a, e, beside = actual.flatten(), expected.flatten(), 0
    else:
        finite = torch.isfinite(actual) & torch.isfinite(expected)
        a, e = actual[finite], expected[finite]
        agree = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
        beside = int((agree & ~finite).sum())
    error = (a - e).abs()
    hits = int((error <= row.atol + row.rtol * e.abs()).sum()) + beside
    figures: dict[str, Any] = {
        "elements": actual.numel(),
        "finite": a.numel(),
        "hit_ratio": hits / actual.numel() if actual.numel() else None,
        "within_specification": hits >= row.hit_ratio * actual.numel(),
    }
    if not a.numel():
        return (
            figures
            | dict.fromkeys(("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse"))
            | {"worst": []}
        )
    relative = error / e.abs().clamp_min(torch.finfo(torch.float32).tiny)
    norms = float(a.norm() * e.norm())
    return figures | {
        "max_abs": float(error.max()),
        "mean_abs": float(error.mean()),
        "max_rel": float(relative.max()),
        "mean_rel": float(relative.mean()),
        "cosine": float(a @ e) / norms if norms else None,
        "mse": float((error * error).mean()),
        "worst": _worst_of(error, actual, expected) if whole else worst(actual, expected),
    }


def worst(actual: torch.Tensor, expected: torch.Tensor) -> list[dict[str, Any]]:
    """The positions that differ most; a NaN or an infinity on one side alone comes first."""
    error = (actual - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    same = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
    return _worst_of(error.masked_fill(same, 0.0).flatten(), actual, expected)


def _worst_of(error: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> list[dict[str, Any]]:
    """The positions of the largest errors; `error` is flat, and 0 where the two agree."""
    largest = torch.topk(error, min(WORST, error.numel()))
    return [
        {
            "index": _index(flat, actual.shape),
            "actual": number(actual.flatten()[flat]),
            "expected": number(expected.flatten()[flat]),
        }
        for flat, size in zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
        if size > 0
    ]


def _index(flat: int, shape: Sequence[int]) -> list[int]:
    """Where a flat position lies; torch's own function imports a computer algebra system for it."""
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return index[::-1]


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite: one pass over the least and the largest, which NaN takes part in."""
    if not tensor.numel() or not tensor.dtype.is_floating_point:
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # no kernel for 8-bit floats
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(wide))


def number(value: torch.Tensor) -> float | str:
    """A float that JSON can say: NaN and infinities as text."""
    plain = float(value)
    return plain if plain == plain and abs(plain) != float("inf") else str(plain)  # noqa: PLR0124 - NaN test
