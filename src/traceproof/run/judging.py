"""Judges a case: rows, who agrees with whom, pairs of ground truths; large cases a chunk of rows at a time."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.arbitration import agree, explain
from traceproof.judge.numerics import Numerics
from traceproof.judge.output import (
    MISCONDUCT,
    Ruling,
    judge_form,
    misconduct,
    numerics_of,
    rule_on,
    surplus,
    with_expected_where_open,
)
from traceproof.ops.base import Tensors, Values
from traceproof.ops.compare import Entries, IndexSet, Samples
from traceproof.ops.op import Op
from traceproof.reasons import Error, Failure, Skip, Verdict
from traceproof.run import schema
from traceproof.run.calls import giving_back
from traceproof.run.case import CPU, SolvedCase, entries_of, expectation, make_inputs, on_host, place
from traceproof.run.untrusted import CaseResult
from traceproof.stacks import TRUTHS

HELD_APART = 1 << 18  # elements: for larger outputs the two known margins bound the difference
EXPLAINED_BYTES = 1 << 28  # larger cases are not drawn again to find out what is wrong with them
Rows = list[schema.VerdictRow]
Rulings = Mapping[str, Ruling]  # by output, or WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """What is expected of a case's outputs: the oracle's or the shadow's entries."""

    oracle: Tensors = field(default_factory=dict)  # by `<output>` (the value) or `<output>@<what>`
    blocked: Ruling | None = None  # why nothing is expected, as each implementation's ruling
    shadow: str = ""  # why there is no float64 shadow where one was needed


@dataclass(kw_only=True, eq=False)
class JudgedCase:
    """One case: its inputs, what is expected, each implementation's result, and the judge's rows."""

    entry: schema.PlannedDefinition
    definition: Definition
    op: Op
    planned: schema.PlannedCase
    records: Mapping[str, Mapping[str, Any]]  # by implementation: of its environment
    code: str = ""  # digest of our code
    tolerance: float | None = None
    dataset: Path | None = None
    inputs: Values | None = None  # None: not drawn, or freed
    digest: str | None = None  # of the drawn inputs
    undrawn: str = ""  # why the inputs could not be drawn
    results: dict[str, CaseResult] = field(default_factory=dict)
    right: Right = field(default_factory=Right)
    large: Mapping[str, Rulings] = field(default_factory=dict)  # by implementation, for cases judged in chunks

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """Rows by implementation: one if there is nothing to compare, else one per output and per broken rule."""
        by_name = {one: [self._row(one, *ruling) for ruling in self.rulings(one)] for one in self.results}
        all_rows = [row for rows in by_name.values() for row in rows]
        for rows in by_name.values():
            rows[:] = [self._arbitrated(row, all_rows) if row.disputed else row for row in rows]
        return by_name

    @property
    def every(self) -> Rows:
        """The rows of all implementations."""
        return [row for rows in self.rows.values() for row in rows]

    def rulings(self, name: str) -> Iterator[tuple[str, Ruling]]:
        """(output or WHOLE, ruling) of one implementation."""
        result, scaled_down = self.results[name], self.entry.scaled_down
        of_case: Ruling | None = None
        if scaled_down and result.reason == Error.EXCEPTION:  # references need not accept other sizes
            raised = (result.message.strip().splitlines() or ["an exception"])[-1]
            refused = f"it does not take the sizes of a scaled-down definition ({scaled_down}): {raised}"
            of_case = Ruling(Verdict.SKIP, Skip.DOES_NOT_FIT, refused, {})
        elif result.status != "ok":
            verdict = Verdict.SKIP if result.status == "skip" else Verdict.ERROR
            of_case = Ruling(verdict, result.reason, result.message, {})
        elif self.right.blocked is not None:
            of_case = self.right.blocked
        elif result.inputs != self.digest:
            why = f"inputs {result.inputs} were seen, the oracle saw {self.digest}"
            of_case = Ruling(Verdict.ERROR, Error.INPUTS_DIFFER, why, {})
        if of_case is not None:
            yield schema.WHOLE, of_case
            return
        is_reference, of_chunks = name == schema.REFERENCE, self.large[name] if self.planned.large else None
        options: dict[str, Any] = {"reference": is_reference, "shadow": self.right.shadow, "numeric": of_chunks}
        for output, ruling in rulings(self.subject, result, tolerance=self.tolerance, **options):
            why = f"with other numbers in its text ({scaled_down}) it fails: {ruling.reason}: {ruling.message}"
            skips = self.entry.renumbered and is_reference and ruling.verdict is Verdict.FAIL
            yield output, Ruling(Verdict.SKIP, Skip.DOES_NOT_FIT, why, {}) if skips else ruling

    @cached_property
    def subject(self) -> SolvedCase:
        """The case and its expected values, without inputs."""
        case, what = self.planned.case, self.definition
        oracle, seed = self.right.oracle, case.seed
        return SolvedCase(definition=what, op=self.op, case=case, inputs={}, oracle=oracle, seed=seed)

    def _row(self, name: str, output: str, ruling: Ruling) -> schema.VerdictRow:
        result, fields = self.results[name], {"output": output, **ruling.fields}
        if result.isolation:
            fields["message"] += f"; isolation was weak: it could reach {result.isolation}"
            fields["isolation"] = result.isolation
        return self.entry.row(self.planned, name, self.records[name], self.code, inputs=result.inputs, **fields)

    @cached_property
    def ran(self) -> dict[str, Tensors]:
        """Outputs by implementation, of those that ran on the same inputs as the oracle."""
        ok = {name: one for name, one in self.results.items() if one.status == "ok" and one.inputs == self.digest}
        return {name: result.outputs for name, result in ok.items()}

    def _apart(self, one: str, other: str, output: str) -> float | None:
        return agree(self.ran[one].get(output), self.ran[other].get(output), self.subject.expected(output))

    def pairs(self) -> Rows:
        """A row per output of two ground truths that both passed: half their distance, in units of the limit."""
        pairs: Rows = []
        if not self.ran or self.tolerance is not None:
            return pairs
        comparisons = self.op.comparisons(self.definition)
        for output, spec in self.definition.outputs.items():
            if isinstance(comparisons.get(output), Samples | IndexSet):
                continue  # sets and random draws have no distance
            elements = math.prod(self.definition.shape_of(spec, self.planned.case.axes) or ())
            passed = {row.implementation: row for row in _passed(self.every, output)}
            truths = [truth for truth in TRUTHS if truth in passed and truth in self.ran]
            for first, second in combinations(truths, 2):
                if elements > HELD_APART:  # half the sum of both margins bounds it
                    gates = (passed[name].gate for name in (first, second))
                    bound = sum(gate.margin for gate in gates if gate is not None and gate.margin is not None) / 2
                    pairs.append(_pair(passed[first], second, output, bound, "at most "))
                elif (distance := self._apart(first, second, output)) is not None:
                    pairs.append(_pair(passed[first], second, output, distance))
        return pairs

    def _arbitrated(self, row: schema.VerdictRow, rows: Rows) -> schema.VerdictRow:
        """A failing row with who agrees with whom, and who is in the minority."""
        implementation, output = row.implementation, row.output
        if output not in self.ran.get(implementation, {}) or not entries_of(self.right.oracle, output):
            return row
        others = [other for other in self.ran if other != implementation]
        distances = {other: self._apart(implementation, other, output) for other in others}
        passed = [one.implementation for one in _passed(rows, output)]
        near = (one for one, value in distances.items() if value is not None and value <= 1 and one not in passed)
        ours, theirs = sorted([implementation, *near]), [schema.ORACLE, *sorted(passed)]
        outvoted = ours if len(ours) < len(theirs) else theirs if len(theirs) < len(ours) else []
        sides = {"ours": ours, "theirs": theirs, "outvoted": outvoted, "recognised": []}
        arbitration = schema.Arbitration.model_validate(sides)
        sentence = f"{', '.join(ours)} against {', '.join(theirs)}: "
        sentence += f"{', '.join(outvoted)} in the minority" if outvoted else "undecided"
        sentence = "no other implementation to compare with" if len(ours) == len(theirs) == 1 else sentence
        return row.changed(message=f"{row.message}; {sentence}", arbitration=arbitration)

    def explained(self, row: schema.VerdictRow) -> schema.VerdictRow:
        """An arbitrated row with the known bugs that give its answer, if any."""
        if row.arbitration is None:
            return row
        case, dataset = self.planned.case, self.dataset
        inputs = self.inputs or make_inputs(self.op, self.definition, case, device=CPU, dataset=dataset)
        subject = replace(self.subject, inputs=inputs)
        expected = subject.expected(row.output, on_gpu=self.results[row.implementation].on_gpu)
        recognised = explain(subject, row.output, self.ran[row.implementation][row.output], expected)
        bugs = "".join(f"; {text}" for text in recognised)
        arbitration = row.arbitration.model_copy(update={"recognised": tuple(recognised)})
        return row.changed(message=row.message + bugs, arbitration=arbitration)


def _passed(rows: Rows, output: str) -> Rows:
    return [row for row in rows if row.output == output and row.verdict == Verdict.PASS]


def _pair(row: schema.VerdictRow, other: str, output: str, gap: float, about: str = "") -> schema.VerdictRow:
    matches = gap <= 1
    verb = "match" if matches else "differ"
    shared = ("definition", "op_type", "case", "size", "seed", "axes", "repeat")
    return schema.VerdictRow(
        **{name: getattr(row, name) for name in shared},
        implementation=f"{row.implementation}{schema.PAIR}{other}",
        against=other,
        output=output,
        verdict=Verdict.PASS if matches else Verdict.FAIL,
        reason=None if matches else Failure.NUMERICS,
        message=f"ground truths {verb}: half of what parts them is {about}{gap:.3g} of the limit",
        gate=schema.GateResult(kind="pair", margin=gap if math.isfinite(gap) else None),
    )


def rulings(  # noqa: PLR0913 - one call, spelled out
    subject: SolvedCase,
    result: CaseResult,
    *,
    tolerance: float | None,
    reference: bool = False,
    shadow: str = "",  # why there is no float64 shadow where one was needed
    numeric: Rulings | None = None,  # for outputs that were judged in chunks; None: they are judged here
) -> Iterator[tuple[str, Ruling]]:
    """(output or WHOLE, ruling): the numbers of each output, then what the call did beside computing."""
    outputs, declared = result.outputs, subject.op.judged(subject.definition)
    subject = replace(subject, outputs=outputs)
    for name, spec in declared.items() if numeric is None else ():
        if name in outputs or (name in subject.definition.outputs and not spec.optional):
            ruling = subject.ruling(name, outputs.get(name), tolerance, reference=reference, on_gpu=result.on_gpu)
            if ruling.reason == Skip.NO_ORACLE and shadow:
                ruling = replace(ruling, message=f"{ruling.message}; no float64 shadow: {shadow}")
            yield name, ruling
    yield from (numeric or {}).items()
    why = "not judged: the output is optional and was not returned, though the case has an answer for it"
    left_out = [name for name, spec in subject.definition.outputs.items() if spec.optional and name not in outputs]
    unjudged = [name for name in left_out if numeric is not None or name in subject.oracle]
    yield from ((name, Ruling(Verdict.SKIP, Skip.UNJUDGED, why, {})) for name in unjudged)
    expected_names, returned = {*declared, *(numeric or ())}, dict.fromkeys([*outputs, *result.surplus])
    yield from ((name, surplus(name)) for name in returned if name not in expected_names)
    conduct = [*misconduct(**{name: getattr(result, name) for name in MISCONDUCT})]
    if result.varying:
        differing = f"a second run on the same inputs gave other bits in {list(result.varying)}"
        conduct.append(Ruling(Verdict.FAIL, Failure.DETERMINISM, differing, {}))
    elif result.varying is not None:
        alike = {"gate": {"kind": "determinism"}}
        conduct.append(Ruling(Verdict.PASS, None, "a second run gave the same bits", alike))
    if result.remembered and result.varying is not None:
        conduct.append(Ruling(Verdict.FAIL, Failure.CACHED, "other inputs gave the same bits in every output", {}))
    yield from ((schema.WHOLE, ruling) for ruling in conduct)


# Elements of all outputs in a chunk: 128 MiB per float64 temporary on a GPU. On a CPU 8 MiB, which exceeds the
# cache, but a product converts all of its weights once per chunk.
CHUNK_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 20}


@dataclass(frozen=True, slots=True)
class LargeCase:
    """Judges a large case, whose op has a `row_axis`, in chunks of rows; all implementations in one pass."""

    case: JudgedCase
    figures: bool = True  # whether outputs that pass get figures

    def rulings(self, device: torch.device) -> dict[str, dict[str, Ruling]]:
        """Rulings by implementation and output, computed on `device` if the case fits there, else on the CPU."""
        with suppress(torch.OutOfMemoryError):
            if device.type == "cuda":
                with giving_back(0):  # other processes share the GPU
                    return self._on(device)
        return self._on(CPU)

    def _on(self, device: torch.device) -> dict[str, dict[str, Ruling]]:
        judged, case = self.case, self.case.planned.case
        found: dict[str, dict[str, Ruling]] = {}
        measured: list[_Measured] = []
        for name, given in judged.ran.items():
            found[name], outputs = {}, Tensors()
            for output, spec in judged.op.judged(judged.definition).items():
                if output not in given and (spec.optional or output not in judged.definition.outputs):
                    continue
                of = {"reference": name == schema.REFERENCE, "on_gpu": judged.results[name].on_gpu}
                expected = expectation(judged.definition, judged.op, case, output, {}, in_chunks=True, **of)
                if (form := judge_form(given.get(output), expected)) is not None:
                    found[name][output] = form
                    continue
                assert expected.dtype is not None  # an op with an oracle knows it
                numerics = numerics_of(expected, expected.dtype, judged.tolerance, figures=self.figures)
                outputs[output] = given[output].to(device)
                measured.append(_Measured(name, output, outputs, numerics))
        inputs = judged.inputs or {}
        self._measure(place(inputs, device) if device.type == "cuda" else on_host(inputs), measured, device.type)
        for one in measured:
            found[one.implementation][one.output] = rule_on(one.numerics)
        failed = any(one.verdict is Verdict.FAIL for rulings in found.values() for one in rulings.values())
        return LargeCase(judged)._on(device) if failed and not self.figures else found  # noqa: SLF001 - its own

    def _measure(self, inputs: Values, measured: "list[_Measured]", device: str) -> None:
        """Feed every chunk to all outputs; then again those chunks that are due for a second pass."""
        definition, case = self.case.definition, self.case.planned.case
        axis = self.case.op.row_axis(definition)
        assert axis is not None
        total = case.axes[axis]
        step = max(1, CHUNK_ELEMENTS[device] * total // definition.output_elements(case.axes))
        chunks = [(start, min(step, total - start)) for start in range(0, total, step)]
        for start, length in chunks:
            entries = self._oracle(inputs, axis, start, length)
            for one in measured:
                one.numerics.measure(*self._chunk(one, entries, start, length), start)
        for start, length in chunks:
            due = [one for one in measured if one.numerics.due(start)]
            entries = self._oracle(inputs, axis, start, length) if due else {}
            for one in due:
                one.numerics.check(*self._chunk(one, entries, start, length), start)

    def _chunk(
        self, one: "_Measured", oracle: Mapping[str, Entries], start: int, length: int
    ) -> tuple[torch.Tensor, Entries]:
        """A chunk of an output, with expected values where it is open, and the oracle's entries that fit it."""
        outputs = {name: value.narrow(0, start, length) for name, value in one.outputs.items()}
        entries = self.case.op.fitting(self.case.definition, one.output, oracle, outputs)
        return with_expected_where_open(outputs[one.output], entries), entries

    def _oracle(self, inputs: Values, axis: str, start: int, length: int) -> dict[str, dict[str, torch.Tensor]]:
        """The oracle's entries for `length` rows from `start`, by output and by what follows `@`."""
        definition, rows = self.case.definition, dict(inputs)
        for name, spec in definition.inputs.items():
            value = inputs[name]
            if isinstance(value, torch.Tensor) and axis in (spec.shape or ()):
                rows[name] = value.narrow((spec.shape or ()).index(axis), start, length)
        entries = self.case.op.expected(definition, rows, self.case.planned.case.seen)
        return {name: entries_of(entries, name) for name in self.case.op.judged(definition)}


class _Measured(NamedTuple):
    """One output of an implementation, while it is measured."""

    implementation: str
    output: str
    outputs: Tensors  # all of the implementation's
    numerics: Numerics
