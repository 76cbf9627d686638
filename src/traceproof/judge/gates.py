"""What a gate says, and the gate over sets of indices; traceproof.judge.numeric_gates has the others."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

EXPONENT = 0x7FF0000000000000  # the bits of a float64 that give the power of two at or below it
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Gate:
    """What a gate said."""

    kind: str  # the gate's name
    margin: float  # the largest ratio of a measured error to its limit; above 1 fails
    detail: str  # one sentence for people

    @property
    def ok(self) -> bool:
        """Whether the gate lets it pass."""
        return self.margin <= 1.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def rounding_rms(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """RMS error per row of one rounding to `dtype`: its worst for one element, its average for the others.

    Where the spacing of `dtype` is u, the square of a rounding is u^2 / 12 on average and u^2 / 4 at most, so n
    elements give u^2 / 12 (1 + 2 / n). Where spacings differ, n is (sum u^2)^2 / sum u^4: 1 where one decides the
    row. What `dtype` holds exactly is not rounded.

    Args:
        rows: float64 matrix, finite.
        dtype: the output's.
    """
    if not dtype.is_floating_point:
        return rows.new_zeros(len(rows))
    limits = torch.finfo(dtype)
    power = (rows.view(torch.int64) & EXPONENT).view(torch.float64)
    spacing = power.clamp_min(limits.smallest_normal) * limits.eps
    steps = rows / spacing
    squares = (spacing * spacing).masked_fill(steps == steps.round(), 0.0)
    total = squares.sum(-1)
    share = (squares * squares).sum(-1) / (total * total).clamp_min(TINY)
    return (squares.mean(-1) / 12 * (1 + 2 * share)).sqrt()


def index_set(actual: torch.Tensor, extras: Mapping[str, torch.Tensor], padding: int) -> Gate:
    """Rows of chosen indices: known candidates, none twice, all there, each within rounding of the k-th best.

    `actual` is int [rows, k]; `extras` are `scores` float64 and `candidates` int64 [rows, candidates], `tolerance`
    float64 [rows]; `padding` fills a row that has fewer candidates than k.
    """
    wrong = 0
    wanted = 0
    for row, chosen in enumerate(actual.to(torch.int64)):
        scores, candidates = extras["scores"][row], extras["candidates"][row]
        usable = candidates >= 0
        scores, candidates = scores[usable], candidates[usable]
        count = min(len(chosen), len(candidates))
        wanted += count
        if not count:
            wrong += int((chosen != padding).sum())
            continue
        boundary = torch.topk(scores, count).values[-1] - extras["tolerance"][row]
        good = candidates[scores >= boundary]
        real = chosen[chosen != padding]
        correct = int(torch.isin(real, good).sum()) - (len(real) - len(torch.unique(real)))
        wrong += (count - min(correct, count)) + max(len(real) - count, 0)
    return Gate("index set", float("inf") if wrong else 0.0, f"{wrong} of {wanted} chosen indices are wrong")
