"""Memory that is handed out without a value holds one that shows.

A reference that forgets to write a part of `torch.empty` gives whatever lay there: zeros of a fresh page, or its
own earlier and right answer. So what it allocates that way is filled first: NaN, the largest integer, or True.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

UNWRITTEN = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.empty_permuted,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    }
)


class Poisoned(TorchFunctionMode):
    """While it is active, `torch.empty` and the like give filled tensors on any device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever torch's function gives
        """Call, and fill what has no value yet."""
        del types
        value = func(*args, **(kwargs or {}))
        if func in UNWRITTEN:
            with torch.no_grad():
                value.fill_(_fill(value.dtype))
        return value


def _fill(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
