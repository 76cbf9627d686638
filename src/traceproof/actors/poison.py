"""Memory that is handed out without a value holds one that shows.

A reference that forgets to write a part of `torch.empty` gives whatever lay there: zeros of a fresh page, or its
own earlier and right answer. So what it allocates that way is filled first: NaN, the largest integer, or True.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Functions that give tensors without values, by where their names are looked up.
UNWRITTEN: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


@contextmanager
def poisoned() -> Iterator[None]:
    """While it is active, `torch.empty` and the like give filled tensors on any device.

    The functions themselves are replaced: to look at every call of torch would cost loops over small tensors half
    as much again.
    """
    own = [(owner, name, vars(owner).get(name)) for owner, name in UNWRITTEN]
    for owner, name in UNWRITTEN:
        setattr(owner, name, _filling(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, before in own:
            if before is None:
                delattr(owner, name)  # inherited
            else:
                setattr(owner, name, before)


def _filling(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - whatever torch's function takes
        value = allocate(*args, **kwargs)
        with torch.no_grad():
            return value.fill_(_fill(value.dtype))

    return filled


def _fill(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
