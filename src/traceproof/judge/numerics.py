"""Numeric verdict over one output, fed chunk by chunk: misplaced NaN and infinities, figures, the gate."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from traceproof.judge.gates import Gate, Rows, numeric_gate, with_least_overflow
from traceproof.judge.metrics import Figures, Row, all_finite
from traceproof.ops.compare import Backward, Close, Exact, Quantised
from traceproof.reasons import Failure

Numeric = Close | Backward | Quantised | Exact
PIECE = 1 << 18  # elements per piece on a CPU: its temporaries stay in the cache


class Misplaced:
    """Checks that NaN and infinities stand where the oracle has them; beyond dtype's max a value may saturate."""

    def __init__(self) -> None:
        self._elements = 0
        self._found: dict[Failure, tuple[int, list[int]]] = {}

    def add(
        self, actual: torch.Tensor, oracle: torch.Tensor, start: int = 0, seen: torch.Tensor | None = None
    ) -> None:
        """Count what is misplaced in a chunk that begins at `start` of the first axis.

        With `seen`, a bool mask, only its elements count, if finite where the oracle is not: others may be NaN or
        infinite too, as a product with zero is, and NaN may stand for infinity.
        """
        self._elements += actual.numel()
        if not actual.dtype.is_floating_point or (all_finite(actual) and all_finite(oracle)):
            return
        e = oracle.to(torch.float64)
        x = with_least_overflow(actual.to(torch.float64), e, actual.dtype)
        if seen is not None:
            lost = seen & torch.isfinite(x)
            self._count(Failure.NAN, lost & torch.isnan(e), start)
            self._count(Failure.INFINITY, lost & torch.isinf(e), start)
            return
        overflow = (e.abs() > torch.finfo(actual.dtype).max) & torch.isfinite(e) & (x.sign() == e.sign())
        self._count(Failure.NAN, torch.isnan(x) != torch.isnan(e), start)
        self._count(Failure.INFINITY, (torch.isinf(x) | torch.isinf(e)) & (x != e) & ~overflow, start)

    def _count(self, kind: Failure, wrong: torch.Tensor, start: int) -> None:
        if count := int(wrong.sum()):
            first = wrong.nonzero()[0].tolist()
            if start:
                first[0] += start
            before = self._found.get(kind, (0, first))
            self._found[kind] = before[0] + count, before[1]

    def failure(self) -> tuple[Failure, str] | None:
        """The failure, NaN before infinity, with how many and where the first is; None: none is misplaced."""
        for kind, what in ((Failure.NAN, "NaN"), (Failure.INFINITY, "infinite")):
            if kind in self._found:
                count, first = self._found[kind]
                return kind, f"{count} of {self._elements} elements are {what} on one side only, first at {first}"
        return None


def exactly(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The oracle's value where float32 computes it exactly: rounded once to `dtype`, as float64."""
    exact = value.to(torch.float32)  # takes away the float64 error of exponentials
    return (exact if dtype.is_floating_point else exact.round()).to(dtype).to(torch.float64)


def inexact(actual: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Bool mask of elements that are not the exact value rounded once; near a midpoint either neighbour is right.

    Either is right only where float32 can not hold the value: a kernel rounds each step of a quotient or a root,
    up to eight in all. Whole numbers and their products it holds exactly.
    """
    wrong = actual.to(torch.float64) != exactly(value, actual.dtype)
    if actual.dtype.itemsize < 4 and wrong.any():
        loose = (value - value.to(torch.float32)).abs() > value.abs() * 2.0**-40
        for off in (1 - 2.0**-21, 1 + 2.0**-21):
            wrong &= ~loose | (actual.to(torch.float64) != exactly(value * off, actual.dtype))
    return wrong


class Numerics:
    """Judges the numbers of one output, from chunks of its first axis that cover it in order.

    Each chunk goes through `measure`; once all were measured, each that is `due` goes through `check`. `row` is
    the specification's tolerance, or the user's, which `decides` in place of the gate. `figures` False leaves
    metrics out, which take a third of the time. `lossless`: the formula is exact here, so the output must be the
    oracle's value, rounded once.
    """

    def __init__(  # noqa: PLR0913 - one output, spelled out
        self,
        comparison: Numeric,
        dtype: torch.dtype,
        row: Row,
        *,
        decides: bool = False,
        figures: bool = True,
        lossless: bool = False,
    ) -> None:
        self._row = row
        # A product's float32 sums have no further rounding; other float32 outputs may be logarithms or quotients.
        # The gate of codes (ExactGate) treats lossless ones itself.
        coded = isinstance(comparison, Exact) and comparison.order is not None
        self._exact = lossless and not coded and (dtype.itemsize < 4 or isinstance(comparison, Backward))
        self._inexact = 0
        self._decides = decides
        self._gate = numeric_gate(comparison, dtype, lossless=lossless)
        self._row_axes = comparison.row_axes if isinstance(comparison, Close) else 1
        self._figures = Figures(row)
        self._with_figures = figures or decides
        self.misplaced = Misplaced()
        self._elements = 0
        self._added = 0  # number of pieces added to the gate so far
        self._places: dict[int, range] = {}  # by a chunk's start: the numbers of its pieces

    def measure(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor], start: int = 0) -> list[Rows]:
        """First pass over a chunk that begins at `start`; returns the pieces for `check_prepared`."""
        prepared = [
            rows
            for first, piece, of_piece in self._pieces(actual, entries)
            if (rows := self._measured(piece, of_piece, start + first)) is not None
        ]
        self._places[start] = range(self._added, self._added + len(prepared))
        self._added += len(prepared)
        return prepared

    def _pieces(
        self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor, Mapping[str, torch.Tensor]]]:
        """Cut a chunk along the first axis: where each piece begins, its part of the output and of the entries."""
        count = len(actual) if actual.dim() > self._row_axes else 1
        step = max(1, PIECE * count // max(actual.numel(), 1))
        if actual.is_cuda or step >= count:
            yield 0, actual, entries
            return
        by_row = {name: value.shape[:1] == actual.shape[:1] for name, value in entries.items()}
        for first in range(0, count, step):
            part = slice(first, first + step)
            yield first, actual[part], {name: v[part] if by_row[name] else v for name, v in entries.items()}

    def _measured(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor], start: int) -> Rows | None:
        """First pass over a piece that begins at `start`; returns it as the gate's rows, None if it is empty."""
        expected = entries[""]  # beside it: the baseline, and other entries of the oracle for this output
        self.misplaced.add(actual, expected, start, entries.get("seen"))
        if self._with_figures:
            self._figures.add(actual.to(torch.float64), expected.to(torch.float64), start)
        self._elements += actual.numel()
        if not actual.numel():
            return None
        if self._exact:
            self._inexact += int(inexact(actual, expected).sum())
        rows = self._gate.prepare(actual, entries)
        self._gate.add(rows)
        return rows

    def due(self, start: int) -> bool:
        """Whether the chunk that begins at `start` needs a second pass, once all were measured."""
        return any(self._gate.due(place) for place in self._places[start])

    def check(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor], start: int = 0) -> None:
        """Second pass over a chunk that begins at `start`."""
        pieces = self._pieces(actual, entries) if actual.numel() else ()
        for place, (_, piece, of_piece) in zip(self._places[start], pieces, strict=True):
            if self._gate.due(place):
                self._gate.check(self._gate.prepare(piece, of_piece))

    def check_prepared(self, prepared: Sequence[Rows]) -> None:
        """Second pass over an output of one chunk, by what `measure` returned."""
        for place, rows in enumerate(prepared):
            if self._gate.due(place):
                self._gate.check(rows)

    def details(self) -> dict[str, Any]:
        """Fields of the verdict row: worst, metrics, specification, a user's tolerance; {}: no figures wanted."""
        if not self._with_figures:
            return {}
        figures = self._figures.summary()
        specification = {"atol": self._row.atol, "rtol": self._row.rtol, "hit_ratio": self._row.hit_ratio}
        fields = {"worst": figures.pop("worst"), "metrics": figures, "specification": specification}
        return fields | ({"tolerance": self._row.atol} if self._decides else {})

    def gate(self) -> Gate | None:
        """Result of the gate; None where the output is empty."""
        if not self._elements:
            return None
        gate = self._tolerated() if self._decides else self._gate.result()
        if not gate.ok or not self._inexact:
            return gate
        many = f"{self._inexact} of {self._elements} elements"
        return Gate("lossless", math.inf, f"{many} are not the exact value, rounded once to nearest even")

    def _tolerated(self) -> Gate:
        """The user's tolerance as a gate: all elements within it, or the specification's share if quantised."""
        figures = self._figures.summary()
        missed, may_miss = 1.0 - figures["hit_ratio"], 1.0 - self._row.hit_ratio
        margin = missed / may_miss if may_miss else self._figures.excess
        within = figures["within_specification"]
        margin = min(margin, 1.0) if within else max(margin, math.nextafter(1.0, 2.0))
        share = f"{figures['hit_ratio']:.4g} of the elements" if missed else "every element"
        detail = f"{share} within your tolerance of {self._row.atol:g}, which replaces the calibrated gate"
        return Gate("tolerance", margin, f"{detail}; largest error {self._figures.excess:.3g}x of it")
