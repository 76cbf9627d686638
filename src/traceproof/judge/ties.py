"""Rows of an output that the order of equal values decides, which a reference's sort or top-k leaves open.

Another right implementation takes other equals, or all of them: nothing says what is right there. So in such rows
another actor's answer is not held to rounding. An output of which all rows are open is not verified, nor is one
with an open row that lies farther from both orders than they lie apart: one that keeps all of two equals does not.
"""

from collections.abc import Mapping

import torch

OTHER_TIES = "other ties"  # entry of an output: what it is with equal values in another order
OPEN = "open"  # entry of an output: which rows are open, bool, 1 in place of its last axis
SAME = 2.0**-30  # relative: what the order of a sum leaves in float64, and more; far below float32's rounding


def with_open_rows(entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An output's entries, and which rows are open, where the shadow in another order of equals shows some."""
    other = entries.get(OTHER_TIES)
    if other is None or "" not in entries or other.shape != entries[""].shape:
        return dict(entries)
    rows = _differing(entries[""], other)
    return {**entries, OPEN: rows} if rows.any() else dict(entries)


def _differing(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The rows in which two tensors differ by more than rounding."""
    one, two = (each.to(torch.float64) for each in (value, other))
    same = (one == two) | (one.isnan() & two.isnan())
    if value.is_floating_point() and value.numel():
        finite = one.masked_fill(~one.isfinite(), 0.0).abs()
        same |= (one - two).abs() <= SAME * (finite.amax(-1, keepdim=True) if finite.dim() else finite)
    return ~(same.all(-1, keepdim=True) if same.dim() else same)


def closed(actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """An output whose open rows hold what is expected, but for NaN that neither order gives."""
    left = entries.get(OPEN)
    if left is None or actual.shape != entries[""].shape:
        return actual
    nowhere = actual.isnan() & ~(entries[""].isnan() | entries[OTHER_TIES].isnan())
    return torch.where(left & ~nowhere, entries[""].to(actual.dtype), actual)


def unverified(actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> str:
    """Why an output that is right elsewhere is not verified for its open rows; empty: it is."""
    left = entries[OPEN]
    if left.all():
        return told(entries)
    value, other, given = (one.to(torch.float64) for one in (entries[""], entries[OTHER_TIES], actual))
    distance = torch.minimum(_apart(given, value), _apart(given, other))
    far = left & ~(distance <= _apart(value, other))
    return f"{told(entries)}, {int(far.sum())} of them lie far from what it gives" if far.any() else ""


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far two tensors lie apart, row by row; not at all where both are the same infinity."""
    difference = torch.where(one == other, 0.0, one - other)
    return (difference * difference).sum(-1, keepdim=True).sqrt()


def told(entries: Mapping[str, torch.Tensor]) -> str:
    """What a verdict says of open rows."""
    left = entries[OPEN]
    return f"{int(left.sum())} of {left.numel()} rows follow from how the reference orders equal values"
