"""Orders equal values the other way where an operation leaves their order open.

What an answer owes to that order is not specified: another implementation may take other equals, or all of them.
Where an operation states which of several equals it takes (a stable sort, argmax), it stays as it is. Runs in the
process of strangers' code: standard library, torch.
"""

# Operations, their arguments and results are whatever torch's dispatcher has.
# ruff: noqa: ANN401
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten


def _sorted(value: torch.Tensor, dim: int = -1, descending: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's
    if not value.dim():
        return aten.sort.default(value, dim, descending)
    values, places = torch.sort(value.flip(dim), dim=dim, descending=descending, stable=True)
    return values, value.size(dim) - 1 - places


def _stably_sorted(value: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    if stable:
        return aten.sort.stable(value, stable=True, dim=dim, descending=descending)
    return _sorted(value, dim, descending)


def _topk(
    value: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,  # noqa: FBT001, FBT002 - torch's
    sorted: bool = True,  # noqa: A002, FBT001, FBT002 - torch's
) -> Any:
    if not value.dim():
        return aten.topk.default(value, k, dim, largest, sorted)
    return tuple(one.narrow(dim, 0, k).contiguous() for one in _sorted(value, dim, largest))


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    aten.sort.default: _sorted,
    aten.sort.stable: _stably_sorted,
    aten.topk.default: _topk,
}
