"""Judging large cases: the oracle is computed here, a chunk of rows at a time, and never stored.

In float64 the oracle's entries of such a case take gigabytes, and one core takes minutes to look at them. So the
judge draws the inputs again, on the GPU if it has one, and compares chunk by chunk; without a GPU all cores do it.
Chunks, gates and order are the same on either, and so is the verdict.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.execution.case import expectation
from traceproof.execution.device import wait_asleep
from traceproof.execution.inputs import drawing_device, fingerprints, make_inputs, place
from traceproof.judge.numerics import Numerics
from traceproof.judge.output import Expected, Ruling, judge_form, numerics_of, rule_on, surplus
from traceproof.ops.base import Op, Values
from traceproof.ops.cases import LARGE_BYTES, Case
from traceproof.ops.compare import IndexSet, Samples
from traceproof.pipeline.records import REFERENCE, WHOLE, PlannedCase
from traceproof.pipeline.run_record import RunRecord
from traceproof.reasons import Error, Verdict
from traceproof.store import Store

Rulings = Mapping[str, Ruling]  # by output, or WHOLE
# Elements of all outputs in a chunk: 128 MiB per float64 temporary on a GPU, a share of the cache on a CPU.
CHUNK_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeCases:
    """The large cases of one definition, all actors of a case being judged in one go."""

    definition: Definition  # the definition
    op: Op  # its op, which has a `row_axis`
    records: Mapping[str, Mapping[str, RunRecord]]  # every actor's records by actor and case id
    outputs: Store  # where outputs lie
    dataset: str  # root of the dataset, for workload lines' blobs
    tolerance: float | None  # overrides the specification's atol and rtol
    device: str  # `cuda` or `cpu`
    _found: dict[str, dict[str, Rulings]] = field(default_factory=dict)

    def rulings(self, planned: PlannedCase, actor: str) -> Rulings:
        """Rulings on an actor's outputs of a case; the actor's record must say `ok`."""
        if planned.id not in self._found:
            self._found[planned.id] = self._judged(planned.case)
        return self._found[planned.id][actor]

    def _judged(self, case: Case) -> dict[str, Rulings]:
        here = {actor: cases.get(case.id) for actor, cases in self.records.items()}
        ran = {actor: record for actor, record in here.items() if record is not None and record.status == "ok"}
        try:
            return self._on_any(case, ran)
        except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, OSError) as error:
            message = f"the oracle: {type(error).__name__}: {error}"
            return {actor: {WHOLE: Ruling(Verdict.ERROR, Error.ORACLE, message, {})} for actor in ran}

    def _on_any(self, case: Case, ran: Mapping[str, RunRecord]) -> dict[str, Rulings]:
        """On the GPU if there is one and the case fits beside the jobs that share it, else on the CPU."""
        if self.device == "cuda":
            try:
                return self.on(torch.device("cuda"), case, ran)
            except torch.OutOfMemoryError:
                pass
            finally:
                torch.cuda.empty_cache()  # other processes share the GPU
        with _all_cores():
            return self.on(torch.device("cpu"), case, ran)

    def on(self, device: torch.device, case: Case, ran: Mapping[str, RunRecord]) -> dict[str, Rulings]:
        """Rulings on one case by actor, computed on `device`; `ran` holds the records of actors that ran it."""
        wait_asleep(device)
        drawn = make_inputs(
            self.op,
            self.definition,
            case,
            device=drawing_device(self.definition, case, device),
            dataset=Path(self.dataset),
        )
        seen = digest_json(fingerprints(drawn))
        found: dict[str, dict[str, Ruling]] = {}
        measured: list[_Measured] = []
        for actor, record in ran.items():
            if record.inputs != seen:
                differ = f"inputs {record.inputs} were seen, the oracle saw {seen}"
                found[actor] = {WHOLE: Ruling(Verdict.ERROR, Error.INPUTS_DIFFER, differ, {})}
                continue
            outputs = self.outputs.tensors(str(record.key), record.as_json())
            found[actor] = {name: surplus(name) for name in outputs if name not in self.definition.outputs}
            for name in self.definition.outputs:
                expected = expectation(
                    self.definition, self.op, case, name, {}, reference=actor == REFERENCE, in_chunks=True
                )
                form = judge_form(outputs.get(name), expected)
                if form is not None:
                    found[actor][name] = form
                    continue
                numerics = self._numerics(expected)
                measured.append(_Measured(actor, name, outputs[name].to(device), numerics))
        self._measure(case, place(drawn, device), measured, device.type)
        for one in measured:
            found[one.actor][one.output] = rule_on(one.numerics)
        return {actor: found[actor] for actor in ran}

    def _numerics(self, expected: Expected) -> Numerics:
        kind = expected.comparison
        assert kind is not None
        assert not isinstance(kind, Samples | IndexSet)  # see `in_chunks`
        assert expected.dtype is not None  # an op with an oracle knows it
        return numerics_of(kind, expected.dtype, self.tolerance)

    def _measure(self, case: Case, inputs: Values, measured: "list[_Measured]", device: str) -> None:
        """Feed every chunk to all that is measured; once more to what has two passes."""
        twice = [one for one in measured if one.numerics.two_passes]
        for start, length in self._chunks(case, device):
            entries = self._oracle(inputs, start, length)
            for one in measured:
                rows = one.numerics.measure(one.rows(start, length), entries[one.output], start)
                if not one.numerics.two_passes:
                    one.numerics.hold_prepared(rows)
        for start, length in self._chunks(case, device) if twice else ():
            entries = self._oracle(inputs, start, length)
            for one in twice:
                one.numerics.hold(one.rows(start, length), entries[one.output])

    def _chunks(self, case: Case, device: str) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each chunk."""
        axis = self.op.row_axis(self.definition)
        assert axis is not None
        total = case.axes[axis]
        step = max(1, CHUNK_ELEMENTS[device] * total // output_elements(self.definition, case))
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
    """An output of an actor while it is measured."""

    actor: str
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
