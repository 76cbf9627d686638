"""The exact support and distribution that top-k and top-p leave of one row."""

import math
from dataclasses import dataclass

import torch

UNIT = 2.0**-24  # float32's unit roundoff


@dataclass(frozen=True, slots=True)
class Support:
    """What one row may yield."""

    tokens: torch.Tensor  # int64 [n], those that may be drawn, most probable first
    probs: torch.Tensor  # float64 [n], their distribution if all of them belong to the support
    optional: torch.Tensor  # bool [n], may be left out: ties at the boundary, or a boundary within rounding of p


def support(row: torch.Tensor, k: int | None, p: float | None) -> Support:
    """The support of one row of probabilities; None: that filter is not there.

    Sorting leaves the order of equal values open, and kernels that filter by a threshold keep all equals. So a
    value at the boundary is followed both ways: `fewest` is what every right sampler keeps at least, `most` what
    it may keep at most. Whether `k` keeps exactly k or all ties decides the mass that top-p then refers to.
    """
    places = row.nonzero().flatten()  # tokens without mass are never drawn, and most have none
    values, order = torch.sort(row[places].to(torch.float64), descending=True, stable=True)
    order = places[order]
    exact = certain = ties = len(values)
    if k is not None and 0 < k < min(len(values), len(row)):
        exact = k
        certain, ties = _class_of(values, float(values[k - 1]))
        if ties == k:
            certain = k
    fewest, most = certain, ties
    if p is not None and len(values):
        fewest, _ = _top_p(values[:exact], p, cautious=True)
        _, most = _top_p(values[:ties], p, cautious=False)
        fewest = min(fewest, certain)
    kept = values[:most]
    optional = torch.arange(most, device=row.device) >= fewest
    return Support(tokens=order[:most], probs=kept / kept.sum(), optional=optional)


def _class_of(values: torch.Tensor, value: float) -> tuple[int, int]:
    """How many of the falling `values` are above `value`, and how many are not below it."""
    return int((values > value).sum()), int((values >= value).sum())


def _top_p(values: torch.Tensor, p: float, *, cautious: bool) -> tuple[int, int]:
    """Of falling `values`, renormalised: how many top-p keeps for sure, and how many at most.

    Token j stays if the mass before it does not exceed p, but the first always stays. Sums in float32, in any
    order, err by about the square root of the number of terms.
    """
    shares = values / values.sum()
    before = torch.cumsum(shares, 0) - shares
    slack = 4 * UNIT * (math.sqrt(len(values)) + 2)
    inside = before < p - slack if cautious else before <= p + slack
    last = max(1, int(inside.sum())) if p > 0 else 1
    above, ties = _class_of(values, float(values[last - 1]))
    certain = last if ties == last else above
    return certain, max(last, ties)


def pack(found: list[Support], device: torch.device) -> dict[str, torch.Tensor]:
    """Rows side by side, padded to the longest: tokens with -1, probs with 0, optional with False."""
    width = max((len(one.tokens) for one in found), default=0)
    tokens = torch.full((len(found), width), -1, dtype=torch.int64, device=device)
    probs = torch.zeros((len(found), width), dtype=torch.float64, device=device)
    optional = torch.zeros((len(found), width), dtype=torch.bool, device=device)
    for row, one in enumerate(found):
        count = len(one.tokens)
        tokens[row, :count], probs[row, :count], optional[row, :count] = one.tokens, one.probs, one.optional
    first = tokens[:, 0] if width else torch.zeros(len(found), dtype=torch.int64, device=device)
    return {"samples": first, "samples@tokens": tokens, "samples@probs": probs, "samples@optional": optional}
