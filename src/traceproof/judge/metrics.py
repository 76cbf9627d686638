"""Figures for every verdict, in float64, and the specification's tolerance table, which does not decide.

Why it does not: at N(0, 1) and 2,048 keys an all-zeros attention output passes an 85 % hit ratio, and the bfloat16
row does not see one dropped token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from traceproof.judge.octaves import OCTAVES


@dataclass(frozen=True, slots=True)
class Row:
    """A tolerance: |actual - expected| <= atol + rtol * |expected| for at least `hit_ratio` of the elements."""

    atol: float
    rtol: float
    hit_ratio: float = 1.0


TABLE: Mapping[torch.dtype, Row] = {
    torch.float32: Row(1e-5, 1e-5),
    torch.float16: Row(1e-3, 1e-3),
    torch.bfloat16: Row(8e-3, 1e-2),
    torch.float8_e4m3fn: Row(1e-1, 2e-1, 0.85),
}
QUANTISED = Row(1e-1, 2e-1, 0.85)  # outputs of fp8 and nvfp4 kernels, whatever their dtype
EXACT = Row(0.0, 0.0)  # integers and booleans


def row_for(dtype: torch.dtype, *, quantised: bool, tolerance: float | None) -> Row:
    """The specification's tolerance for an output of `dtype`; `tolerance` replaces its atol and rtol."""
    row = QUANTISED if quantised else TABLE.get(dtype, EXACT)
    return row if tolerance is None else Row(tolerance, tolerance, row.hit_ratio)


WORST = 5
TINY = 1e-300  # avoids 0 / 0 where the tolerance is 0
FRACTION_BITS, EXPONENT_OF_1 = 52, 1023  # of float64


class Figures:
    """Errors of an output against float64 values, added up chunk by chunk."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._elements = self._finite = self._hits = 0
        self.excess = 0.0  # largest error over what the row allows at its place
        self._max_abs = self._max_rel = self._sum_abs = self._sum_rel = 0.0
        self._squares = self._actual_energy = self._expected_energy = self._product = 0.0
        self._worst: list[tuple[float, dict[str, Any]]] = []
        self._octaves = [0] * (OCTAVES[1] - OCTAVES[0] + 1)

    def add(self, actual: torch.Tensor, expected: torch.Tensor, start: int = 0) -> None:
        """Add a chunk: both float64 and of one shape; `start` is its place along the first axis."""
        all_are_finite = all_finite(actual) and all_finite(expected)
        # Mostly all is finite, and selecting elements costs more than the figures.
        if all_are_finite:
            a, e = actual.flatten(), expected.flatten()
        else:
            finite = torch.isfinite(actual) & torch.isfinite(expected)
            a, e = actual[finite], expected[finite]
            self._hits += int((_same(actual, expected) & ~finite).sum())
        error, magnitude = (a - e).abs_(), e.abs()
        self._elements += actual.numel()
        self._finite += a.numel()
        allowed = (magnitude * self._row.rtol).add_(self._row.atol)
        self._hits += int((error <= allowed).sum())
        most = float(error.max()) if all_are_finite and a.numel() else math.inf
        # mostly none is worse than those known, and a search for the largest costs a tenth of the figures
        if len(self._worst) < WORST or most > self._worst[-1][0]:
            largest = _worst_of(error, actual, expected) if all_are_finite else worst(actual, expected)
            for _, place in largest:
                if start:
                    place["index"][0] += start
            self._worst = sorted([*self._worst, *largest], key=lambda item: -item[0])[:WORST]
        if not a.numel():
            return
        share = error / allowed.clamp_min_(TINY)
        self.excess = max(self.excess, float(share.max()))
        self._count(share)
        relative = error / magnitude.clamp_min_(torch.finfo(torch.float32).tiny)
        self._max_abs = max(self._max_abs, most if all_are_finite else float(error.max()))
        self._max_rel = max(self._max_rel, float(relative.max()))
        self._sum_abs += float(error.sum())
        self._sum_rel += float(relative.sum())
        self._squares += float(error @ error)
        self._actual_energy += float(a @ a)
        self._expected_energy += float(e @ e)
        self._product += float(a @ e)

    def _count(self, share: torch.Tensor) -> None:
        """Add each `share`, error / allowed, to the histogram: bin i has [2^(k-1), 2^k), k = OCTAVES[0] + i."""
        low, high = OCTAVES
        # Exponents from the float64's bits: no share is negative, and 0 has the least exponent.
        exponent = share.clamp_max_(2.0**high).view(torch.int64) >> FRACTION_BITS
        exponent.sub_(EXPONENT_OF_1 - 1 + low).clamp_(0, high - low)
        counts = torch.bincount(exponent, minlength=len(self._octaves)).tolist()
        self._octaves = [before + more for before, more in zip(self._octaves, counts, strict=True)]

    def summary(self) -> dict[str, Any]:
        """The figures of all chunks, over the elements where both are finite.

        max_abs, mean_abs, max_rel, mean_rel, cosine, mse, hit_ratio (of the tolerance, over all elements),
        histogram (elements by error as a share of what is allowed at their place, a bin per octave of OCTAVES),
        worst (the 5 largest absolute errors: index, actual, expected). Figures without any element are None.
        """
        count, elements = self._finite, self._elements
        figures: dict[str, Any] = {
            "elements": elements,
            "finite": count,
            "hit_ratio": self._hits / elements if elements else None,
            "within_specification": self._hits >= self._row.hit_ratio * elements,
        }
        if not count:
            names = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "histogram")
            return figures | dict.fromkeys(names) | {"worst": []}
        norms = math.sqrt(self._actual_energy) * math.sqrt(self._expected_energy)
        return figures | {
            "max_abs": self._max_abs,
            "mean_abs": self._sum_abs / count,
            "max_rel": self._max_rel,
            "mean_rel": self._sum_rel / count,
            "cosine": self._product / norms if norms else None,
            "mse": self._squares / count,
            "histogram": self._octaves,
            "worst": [place for _, place in self._worst],
        }


def worst(actual: torch.Tensor, expected: torch.Tensor) -> list[tuple[float, dict[str, Any]]]:
    """The up to WORST elements that differ most: (error, place); a NaN or infinity on one side alone is first."""
    error = (actual - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return _worst_of(error.masked_fill(_same(actual, expected), 0.0).flatten(), actual, expected)


def _same(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Bool mask of the elements that are equal, or NaN in both."""
    return (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))


def _worst_of(
    error: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor
) -> list[tuple[float, dict[str, Any]]]:
    """The largest errors with their places; `error` is flat, and 0 where the two agree."""
    largest, places = torch.topk(error, min(WORST, error.numel())), []
    for flat, size in zip(largest.indices.tolist(), largest.values.tolist(), strict=True):
        if size > 0:
            computed, wanted = number(actual.flatten()[flat]), number(expected.flatten()[flat])
            places.append((size, {"index": index_of(flat, actual.shape), "actual": computed, "expected": wanted}))
    return places


def index_of(flat: int, shape: Sequence[int]) -> list[int]:
    """Index along each axis of a flat position; torch.unravel_index would import sympy."""
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return index[::-1]


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite: one pass, since both ends of aminmax are NaN where any element is."""
    if not tensor.numel() or not tensor.dtype.is_floating_point:
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # PyTorch has no aminmax for 8-bit floats
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(wide))


def number(value: torch.Tensor) -> float | str:
    """The value as JSON can hold it: NaN and infinities as text."""
    plain = float(value)
    return plain if plain == plain and abs(plain) != float("inf") else str(plain)  # noqa: PLR0124 - NaN test
