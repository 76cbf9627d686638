"""Figures of one comparison, in float64."""

from __future__ import annotations

from typing import Any

import torch

from traceproof.judge.specification import Row

WORST = 5


def metrics(actual: torch.Tensor, expected: torch.Tensor, row: Row) -> dict[str, Any]:
    """Errors of `actual` against `expected` (float64, same shape), over the positions where both are finite.

    max_abs, mean_abs, max_rel, mean_rel, cosine, mse, hit_ratio (of `row`, over all positions), worst (the
    top 5 positions by absolute error: index, actual, expected). Figures that no position supports are None.
    """
    finite = torch.isfinite(actual) & torch.isfinite(expected)
    # Picking elements costs several times what the figures do, and mostly there is nothing to leave out.
    a, e = (actual.flatten(), expected.flatten()) if finite.all() else (actual[finite], expected[finite])
    agree = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
    error = (a - e).abs()
    hits = int((error <= row.atol + row.rtol * e.abs()).sum()) + int((agree & ~finite).sum())
    figures: dict[str, Any] = {
        "elements": actual.numel(),
        "finite": int(finite.sum()),
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
        "worst": worst(actual, expected),
    }


def worst(actual: torch.Tensor, expected: torch.Tensor) -> list[dict[str, Any]]:
    """The positions that differ most; a NaN or an infinity on one side alone comes first."""
    error = (actual - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    same = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
    error = error.masked_fill(same, 0.0).flatten()
    count = min(WORST, int((error > 0).sum()))
    found = []
    for flat in torch.topk(error, count).indices.tolist():
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)]
        found.append(
            {
                "index": index,
                "actual": number(actual.flatten()[flat]),
                "expected": number(expected.flatten()[flat]),
            }
        )
    return found


def number(value: torch.Tensor) -> float | str:
    """A float that JSON can say: NaN and infinities as text."""
    plain = float(value)
    return plain if plain == plain and abs(plain) != float("inf") else str(plain)  # noqa: PLR0124 - NaN test
