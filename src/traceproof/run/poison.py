"""Filled memory where PyTorch would give memory without a value. Standard library and torch only."""

import functools
import math
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
def poisoned(fill: float | None = math.nan) -> Iterator[None]:
    """While it is active, `torch.empty` and the like give filled tensors on any device.

    A reference that forgets to write a part of such memory gives whatever lay there: zeros of a fresh page, or its
    own earlier and right answer. The functions themselves are replaced: to look at every call of torch would cost
    loops over small tensors half as much again. `fill` is of floating-point memory; integers get the largest one
    for NaN, else `fill` cut to their range. None: memory is left as it is.
    """
    if fill is None:
        yield
        return
    own = [(owner, name, vars(owner).get(name)) for owner, name in UNWRITTEN]
    for owner, name in UNWRITTEN:
        setattr(owner, name, _filling(getattr(owner, name), fill))
    try:
        yield
    finally:
        for owner, name, before in own:
            if before is None:
                delattr(owner, name)  # inherited
            else:
                setattr(owner, name, before)


def _filling(allocate: Callable[..., torch.Tensor], fill: float) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - whatever torch's function takes
        value = allocate(*args, **kwargs)
        with torch.no_grad():
            return value.fill_(filler(value.dtype, fill))

    return filled


def filler(dtype: torch.dtype, fill: float) -> float | int | bool:
    """What memory of a dtype is filled with."""
    if dtype == torch.float8_e8m0fnu:
        return abs(fill)  # it has no sign, and refuses one
    if dtype.is_floating_point or dtype.is_complex:
        return fill if math.isnan(fill) else max(-240.0, min(240.0, fill))  # in the range of every float
    if dtype == torch.bool:
        return True
    return torch.iinfo(dtype).max if math.isnan(fill) else int(abs(fill)) % torch.iinfo(dtype).max
