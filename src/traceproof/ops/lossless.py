"""Inputs for which a formula is computed exactly in float32, in any order of sums, until the output is rounded.

Then no error is allowed but that one rounding, to nearest, ties to even: each element has one right value. It
shows ties that go the other way, values that are cut off, sums in half precision, constants that are a little off.

Values are whole numbers times powers of two, of so few bits that every product and partial sum is exact in
float32, and outputs lie on, and close to, the middle between two neighbours. What is no sum of products gets
arguments at which it is exact: an exponential 0, so that all keys weigh the same, and there are a power of two of
them; a sigmoid 64, which makes it 1; a root a power of four, beside which an eps is nothing in float32. Softcap's
tanh is exact at 0 alone, and a gated norm without a weight gives what its input's dtype holds: they have no such
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.ops.formula import Wanted

Exactly = float | Callable[["Draw", "Wanted"], "torch.Tensor"]  # a number in every place, or what is drawn
MOST_BITS = 11  # of a number: products of two are exact in float32, and so are sums of four of these
SURE = 64.0  # exp(-64) is nothing beside 1 in float64
NEVER = -1e4  # exp of it is 0
# Eight numbers whose mean square is 4: over rows of them, the root of the mean square is 2 times their factor.
BALANCED = (5.0, 2.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


def full(power: int, *, most: int = MOST_BITS, signed: bool = True) -> Callable[[Draw, Wanted], torch.Tensor]:
    """A function that draws numbers of the dtype's bits, `most` at most, of magnitude 2**power / 2 to 2**power."""

    def drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
        bits = min(2 - math.frexp(torch.finfo(wanted.dtype).eps)[1], most)
        made = draw.integers(f"{wanted.name}.exact", wanted.shape, low=1 << (bits - 1), high=1 << bits).float()
        signs = draw.integers(f"{wanted.name}.sign", wanted.shape, low=0, high=2) * 2 - 1
        return (made * (signs if signed else 1) * 2.0 ** (power - bits)).to(wanted.dtype)

    return drawn


def whole(most: int) -> Callable[[Draw, Wanted], torch.Tensor]:
    """A function that draws whole numbers from -`most` to `most`."""

    def drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
        return draw.integers(f"{wanted.name}.exact", wanted.shape, low=-most, high=most + 1).to(wanted.dtype)

    return drawn


def one_hot(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw vectors, along the last axis, of zeros and a one in a random place."""
    *rows, width = wanted.shape
    place = draw.integers(f"{wanted.name}.exact", (*rows, 1), torch.int64, low=0, high=width)
    return torch.zeros(wanted.shape, device=draw.device).scatter_(-1, place, 1.0).to(wanted.dtype)


def balanced(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw rows whose mean square is exact, so large that an eps changes nothing: BALANCED, rotated, signed."""
    *rows, width = wanted.shape
    turn = draw.integers(f"{wanted.name}.exact", (*rows, 1), torch.int64, low=0, high=len(BALANCED))
    place = (torch.arange(width, device=draw.device) + turn) % len(BALANCED)
    signs = draw.integers(f"{wanted.name}.sign", wanted.shape, low=0, high=2) * 2 - 1
    factor = 256.0 if wanted.dtype is torch.float16 else 2.0**20
    return (torch.tensor(BALANCED, device=draw.device)[place] * signs * factor).to(wanted.dtype)
