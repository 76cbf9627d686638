"""Runs code at its own precision with its sums in another order: what any right order may lose.

Runs in the process of strangers' code: standard library, torch.
"""

# Operations, their arguments and results are whatever torch's dispatcher has.
# ruff: noqa: ANN401, SLF001
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
NARROW = frozenset({torch.bfloat16, torch.float16})
ORDER_DECIDES = 2.0**-19  # relative: 32 roundings of float32, what a sum of 1,000 terms loses and some more


class PlainMode(TorchDispatchMode):
    """A mode whose first operation does not import the compiler, a second of processor time per process.

    Compiled code runs below it all the same: the mode sees what the code compiles to.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class OtherOrder(PlainMode):
    """Computes as the code says, at its own precision, but sums backwards: what any right order may lose.

    A stated rounding on the way takes the other neighbour where another order could: one step of a narrow dtype,
    thousands of times what float32 loses, which no sum of ours need happen to show.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        backwards = BACKWARDS.get(func)
        named = kwargs or {}
        if func is aten._to_copy.default and args[0].dtype is torch.float32 and named.get("dtype") in NARROW:
            return _other_neighbour(args[0], func(*args, **named))
        return func(*args, **named) if backwards is None else backwards(func, *args, **named)


def _other_neighbour(value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Float32 values rounded, those the other way that lie so near to the middle that a sum's order decides."""
    found = rounded
    for side in (1 + ORDER_DECIDES, 1 - ORDER_DECIDES):
        other = (value * side).to(rounded.dtype)
        found = torch.where((other.float() != rounded.float()) & other.isfinite(), other, found)
    return found


def _products(func: Any, *args: Any, **named: Any) -> Any:
    *first, left, right = args
    return func(*first, left.flip(-1), right.flip(-2), **named)


def _sums(func: Any, value: torch.Tensor, dims: Any = None, *rest: Any, **named: Any) -> Any:
    over = list(range(value.dim())) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    return func(value.flip(over or list(range(value.dim()))), dims, *rest, **named)


def _whole(func: Any, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
    return func(value.flip(list(range(value.dim()))), *rest, **named)


def _along(func: Any, value: torch.Tensor, dim: int, *rest: Any, **named: Any) -> Any:
    return func(value.flip(dim), dim, *rest, **named).flip(dim)


BACKWARDS: Mapping[Any, Callable[..., Any]] = {
    aten.mm.default: _products,
    aten.bmm.default: _products,
    aten.addmm.default: _products,
    aten.baddbmm.default: _products,
    aten.sum.default: _whole,
    aten.mean.default: _whole,
    aten.sum.dim_IntList: _sums,
    aten.mean.dim: _sums,
    aten.logsumexp.default: _sums,
    aten._softmax.default: _along,
    aten._log_softmax.default: _along,
}
