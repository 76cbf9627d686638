"""Judging large cases: the oracle is computed a chunk of rows at a time.

In float64 the oracle's entries of such a case take gigabytes, and one core takes minutes to look at them. So the
judge compares chunk by chunk, on the GPU if there is one; without a GPU all cores do it.
Chunks, gates and order are the same on either, and so is the verdict.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.numerics import Numerics
from traceproof.judge.output import Expected, Ruling, judge_form, numerics_of, rule_on, surplus
from traceproof.ops.base import Op, Tensors, Values
from traceproof.ops.cases import LARGE_BYTES, Case
from traceproof.ops.compare import IndexSet, Samples
from traceproof.run.case import expectation
from traceproof.run.device import giving_back
from traceproof.run.inputs import on_host, place
from traceproof.run.records import REFERENCE

# Elements of all outputs in a chunk: 128 MiB per float64 temporary on a GPU, a share of the cache on a CPU.
CHUNK_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeCase:
    """A large case of one definition, all implementations being judged in one go."""

    definition: Definition
    op: Op  # which has a `row_axis`
    case: Case
    inputs: Values
    tolerance: float | None  # overrides the specification's atol and rtol

    def rulings(self, outputs: Mapping[str, Tensors], device: torch.device) -> dict[str, dict[str, Ruling]]:
        """Rulings by implementation and output: on the GPU if there is one and the case fits, else on the CPU."""
        if device.type == "cuda":
            try:
                with giving_back(0):  # other processes share the GPU
                    return self.on(device, outputs)
            except torch.OutOfMemoryError:
                pass
        with _all_cores():
            return self.on(torch.device("cpu"), outputs)

    def on(self, device: torch.device, outputs: Mapping[str, Tensors]) -> dict[str, dict[str, Ruling]]:
        """The same, computed on `device`."""
        found: dict[str, dict[str, Ruling]] = {}
        measured: list[_Measured] = []
        for name, given in outputs.items():
            found[name] = {one: surplus(one) for one in given if one not in self.definition.outputs}
            for output in self.definition.outputs:
                expected = expectation(
                    self.definition, self.op, self.case, output, {}, reference=name == REFERENCE, in_chunks=True
                )
                form = judge_form(given.get(output), expected)
                if form is not None:
                    found[name][output] = form
                    continue
                numerics = self._numerics(expected)
                measured.append(_Measured(name, output, given[output].to(device), numerics))
        self._measure(
            place(self.inputs, device) if device.type == "cuda" else on_host(self.inputs), measured, device.type
        )
        for one in measured:
            found[one.implementation][one.output] = rule_on(one.numerics)
        return found

    def _numerics(self, expected: Expected) -> Numerics:
        kind = expected.comparison
        assert kind is not None
        assert not isinstance(kind, Samples | IndexSet)  # see `in_chunks`
        assert expected.dtype is not None  # an op with an oracle knows it
        return numerics_of(kind, expected.dtype, self.tolerance)

    def _measure(self, inputs: Values, measured: "list[_Measured]", device: str) -> None:
        """Feed every chunk to all that is measured; once more to what has two passes."""
        twice = [one for one in measured if one.numerics.two_passes]
        for start, length in self._chunks(device):
            entries = self._oracle(inputs, start, length)
            for one in measured:
                rows = one.numerics.measure(one.rows(start, length), entries[one.output], start)
                if not one.numerics.two_passes:
                    one.numerics.hold_prepared(rows)
        for start, length in self._chunks(device) if twice else ():
            entries = self._oracle(inputs, start, length)
            for one in twice:
                one.numerics.hold(one.rows(start, length), entries[one.output])

    def _chunks(self, device: str) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each chunk."""
        axis = self.op.row_axis(self.definition)
        assert axis is not None
        total = self.case.axes[axis]
        step = max(1, CHUNK_ELEMENTS[device] * total // output_elements(self.definition, self.case))
        for start in range(0, total, step):
            yield start, min(step, total - start)

    def _oracle(self, inputs: Values, start: int, length: int) -> dict[str, dict[str, torch.Tensor]]:
        """The oracle's entries for some rows, by output and by what follows `@`."""
        axis = self.op.row_axis(self.definition)
        cut: Values = {}
        for name, spec in self.definition.inputs.items():
            value = inputs[name]
            if isinstance(value, torch.Tensor) and axis in (spec.shape or ()):
                value = value.narrow((spec.shape or ()).index(axis), start, length)
            cut[name] = value
        entries: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.definition.outputs}
        for name, value in self.op.answers(self.definition, cut).items():
            output, _, what = name.partition("@")
            entries[output][what] = value
        return entries


@dataclass(frozen=True, slots=True)
class _Measured:
    """An output of an implementation while it is measured."""

    implementation: str
    output: str
    value: torch.Tensor
    numerics: Numerics

    def rows(self, start: int, length: int) -> torch.Tensor:
        """Some of its rows."""
        return self.value.narrow(0, start, length)


def output_elements(definition: Definition, case: Case) -> int:
    """Elements of all outputs of a case together."""
    return sum(
        torch.Size(definition.shape_of(spec, case.axes) or ()).numel() for spec in definition.outputs.values()
    )


def is_large(definition: Definition, op: Op, case: Case) -> bool:
    """Whether a case is judged here: it is large, and its rows can be looked at by themselves.

    The op must have an oracle for the definition.
    """
    axis = op.row_axis(definition)
    if axis is None or not output_elements(definition, case):
        return False
    if op.memory(definition, case) < LARGE_BYTES:
        return False
    first = all((spec.shape or ())[:1] == (axis,) for spec in definition.outputs.values())
    kinds = op.comparisons(definition)
    numeric = all(name in kinds and not isinstance(kinds[name], Samples | IndexSet) for name in definition.outputs)
    return first and numeric


@contextmanager
def _all_cores() -> Iterator[None]:
    """All cores for one case: cases of this size come one after the other on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
