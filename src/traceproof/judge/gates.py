"""The calibrated gates, one a kind of comparison (traceproof.ops.compare)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from traceproof.judge.metrics import all_finite
from traceproof.ops.compare import Backward, Close, Exact, Quantised

PEAK = 4.0  # how far the largest of many rounding errors lies above their RMS, for rows too short to show it
TINY = 1e-30
SIGMAS = 5.0  # one slope in 1.7 million lies farther off by luck


@dataclass(frozen=True, slots=True)
class Gate:
    """What a gate said.

    Attributes:
        kind: the gate's name.
        margin: the largest ratio of a measured error to its limit; above 1 fails.
        detail: one sentence for people.
    """

    kind: str
    margin: float
    detail: str

    @property
    def ok(self) -> bool:
        """Whether the gate lets it pass."""
        return self.margin <= 1.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def _rows(tensor: torch.Tensor, axes: int = 1) -> torch.Tensor:
    """A matrix of the rows that the last `axes` axes make; the whole tensor is one where it has no more."""
    whole = tensor.dim() <= axes
    return tensor.reshape(1, -1) if whole else tensor.reshape(-1, math.prod(tensor.shape[-axes:]))


def _rms(rows: torch.Tensor) -> torch.Tensor:
    return (rows * rows).mean(-1).sqrt()


def close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    floor: torch.Tensor,
    kind: Close,
    dtype: torch.dtype | None = None,
) -> Gate:
    """Error against the oracle, elementwise and by row, at most `factor` times the floor's, plus one rounding.

    `actual` and `floor` hold values of the output's `dtype` (None: that of `actual`), `expected` is float64; all
    have one shape. A row's own floor may be small by luck, so a row is also allowed what the whole output's floor
    loses in proportion to its magnitude. Positions that are not finite on either side have been judged before.
    """
    a, e, f = (_rows(t.to(torch.float64), kind.row_axes) for t in (actual, expected, floor))
    error, lost = (a - e).abs(), (f - e).abs()
    if not all(all_finite(t) for t in (a, e, f)):
        finite = torch.isfinite(a) & torch.isfinite(e) & torch.isfinite(f)
        error, lost, e = (t.masked_fill(~finite, 0.0) for t in (error, lost, e))
    scale = _rms(e)
    rounding = unit_roundoff(dtype or actual.dtype)
    pooled = float(_rms((_rms(lost) / scale.clamp_min(TINY))[scale > 0].reshape(1, -1)).nan_to_num().sum())
    own_peak = lost.amax(-1, keepdim=True)
    once = rounding * e.abs()
    limit = (
        kind.factor * torch.maximum(torch.maximum(own_peak, PEAK * pooled * scale[:, None]), once) + once + TINY
    )
    elementwise = float((error / limit).max())
    row_limit = kind.factor * torch.maximum(_rms(lost), pooled * scale) + rounding * scale / 3**0.5 + TINY
    by_row = float((_rms(error) / row_limit).max())
    ratios = {"largest error": elementwise, "row RMS": by_row}
    if kind.rms is not None:
        total = float(_rms(e.reshape(1, -1)))
        ratios["RMS"] = float(_rms(error.reshape(1, -1))) / (kind.rms * total + TINY)
    which = max(ratios, key=lambda name: ratios[name])
    detail = f"{which} {ratios[which] * kind.factor:.3g}x the low-precision floor (limit {kind.factor:g}x)"
    return Gate("floor", ratios[which], detail)


def backward(
    actual: torch.Tensor,
    expected: torch.Tensor,
    bound: torch.Tensor,
    kind: Backward,
    dtype: torch.dtype | None = None,
) -> Gate:
    """|actual - expected| <= limit * bound + one rounding, elementwise."""
    a = actual.to(torch.float64)
    finite = torch.isfinite(a) & torch.isfinite(expected)
    error = torch.where(finite, (a - expected).abs(), torch.zeros((), dtype=torch.float64))
    limit = kind.limit * bound + unit_roundoff(dtype or actual.dtype) * expected.abs().nan_to_num() + TINY
    margin = float((error / limit).max())
    return Gate(
        "backward",
        margin,
        f"backward error {margin * kind.limit:.3g} units of sqrt(K)*eps*|A||B| (limit {kind.limit:g})",
    )


def quantised(
    actual: torch.Tensor,
    expected: torch.Tensor,
    roundings: torch.Tensor | None,
    kind: Quantised,
    dtype: torch.dtype | None = None,
) -> Gate:
    """Relative RMS error of every row, and the slope against the oracle over the whole output.

    Roundings without a bias still tilt the slope, the more the fewer they are: by the size of the error at right
    angles to the oracle over the root of their number. The slope may be off by SIGMAS times that beyond its limit,
    so a wrong factor shows in exact answers, and in rounded ones where enough of them are averaged.

    Args:
        actual: the output.
        expected: the oracle's.
        roundings: the oracle's entry `@roundings`, float64 [1]; None: so many that none of it is left to luck.
        kind: the limits.
        dtype: the output's; None: `actual`'s own.
    """
    a, e = _rows(actual.to(torch.float64)), _rows(expected)
    finite = torch.isfinite(a) & torch.isfinite(e)
    zero = torch.zeros((), dtype=torch.float64)
    a, e = torch.where(finite, a, zero), torch.where(finite, e, zero)
    rounding = unit_roundoff(dtype or actual.dtype)
    rows = float((_rms(a - e) / ((kind.rms + rounding) * _rms(e) + TINY)).max())
    energy = float((e * e).sum())
    slope = float((a * e).sum()) / energy if energy else 1.0
    limit = kind.slope
    if roundings is not None and energy:
        across = float((a - slope * e).norm()) / energy**0.5
        limit += SIGMAS * across / max(float(roundings.sum()), 1.0) ** 0.5
    ratios = {"row RMS": rows, "slope": abs(slope - 1.0) / limit}
    which = max(ratios, key=lambda name: ratios[name])
    detail = f"row RMS error {rows * kind.rms:.3g} of the oracle's (limit {kind.rms:g})"
    return Gate("quantised", ratios[which], f"{detail}, slope {slope:.4f} (limit 1 +- {limit:.2g})")


def exact(actual: torch.Tensor, expected: torch.Tensor, kind: Exact) -> Gate:
    """Every element equal."""
    del kind
    wrong = int((actual.to(expected.dtype) != expected).sum())
    return Gate("exact", float("inf") if wrong else 0.0, f"{wrong} of {actual.numel()} elements differ")


def index_set(actual: torch.Tensor, extras: Mapping[str, torch.Tensor], padding: int) -> Gate:
    """Rows of chosen indices: known candidates, none twice, all there, each within rounding of the k-th best.

    Args:
        actual: int [rows, k].
        extras: `scores` float64 and `candidates` int64 [rows, candidates], `tolerance` float64 [rows].
        padding: what fills a row that has fewer candidates than k.
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
