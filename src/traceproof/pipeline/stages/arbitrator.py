"""Where actors differ: ground truths held against each other, and who is in the minority where one fails."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

import torch

from traceproof.actors.registry import PAIR
from traceproof.dataset.definition import Definition
from traceproof.execution.case import Subject, expectation
from traceproof.execution.inputs import make_inputs
from traceproof.judge.arbitration import agree, explain
from traceproof.judge.output import Expected
from traceproof.ops import registry
from traceproof.ops.base import Op
from traceproof.ops.compare import IndexSet, Samples
from traceproof.pipeline.records import ORACLE, SHADOW, WHOLE, PlannedCase, PlannedDefinition
from traceproof.pipeline.rows import Arbitration, GateResult, VerdictRow
from traceproof.pipeline.run_record import RunRecord
from traceproof.reasons import Failure, Verdict
from traceproof.stacks import TRUTHS
from traceproof.store import Store

DISPUTED = frozenset({Failure.NUMERICS, Failure.NAN, Failure.INFINITY})
HELD_APART = 1 << 18  # elements: of larger outputs the errors that are known already bound the difference
EXPLAINED_BYTES = 1 << 28  # larger cases are not computed again to find out what is wrong with them
Rows = list[VerdictRow]


def entries_of(
    outputs: Store, expected: RunRecord | None, definition: Definition
) -> dict[str, dict[str, torch.Tensor]]:
    """The oracle's entries by output and by what follows `@`; empty ones where it left none.

    Of a reference's record, which stands in for an oracle, its shadow takes the place of the value.
    """
    entries: dict[str, dict[str, torch.Tensor]] = {name: {} for name in definition.outputs}
    if expected is not None and expected.status == "ok":
        shadowed = expected.shadow is not None
        for name, value in outputs.tensors(str(expected.key), expected.as_json()).items():
            output, beside, what = name.partition("@")
            if not shadowed or beside:
                entries.setdefault(output, {})["" if what == SHADOW else what] = value
    return {name: found if "" in found else {} for name, found in entries.items()}


@dataclass(frozen=True, kw_only=True)
class Arbitrator:
    """All that was said of one definition."""

    entry: PlannedDefinition  # the definition and its cases, as planned
    oracle: Mapping[str, RunRecord]  # the oracle's records by case id
    records: Mapping[str, Mapping[str, RunRecord]]  # each other actor's
    outputs: Store  # where outputs lie
    dataset: str  # root of the dataset, for workload lines' blobs
    tolerance: float | None = None  # the user's; ground truths are not held against each other then

    def arbitrated(self, rows: Rows) -> Iterator[VerdictRow]:
        """The rows, those of numeric failures with who is in the minority, and one per pair of ground truths."""
        definition = self.entry.parsed
        op, _ = registry.for_definition(definition)
        by_case: dict[str, Rows] = defaultdict(list)
        for row in rows:
            by_case[str(row.case)].append(row)
        explained: set[str] = set()
        pairs: Rows = []
        arbitrated: dict[int, VerdictRow] = {}
        for planned in sorted(self.entry.cases, key=lambda planned: planned.memory):
            here = by_case[planned.id]
            case = _CaseArbitrator(self, definition, op, planned, here)
            pairs += case.pairs() if self.tolerance is None else []
            for row in here:
                if row.verdict == Verdict.FAIL and row.reason in DISPUTED and row.output != WHOLE:
                    again = row.actor in explained or planned.memory > EXPLAINED_BYTES
                    arbitrated[id(row)] = case.arbitrate(row, explaining=not again)
            explained |= {row.actor for row in here if arbitrated.get(id(row), row).arbitration is not None}
        yield from (arbitrated.get(id(row), row) for row in rows)
        order = {planned.id: index for index, planned in enumerate(self.entry.cases)}
        yield from sorted(pairs, key=lambda row: (row.actor, order[str(row.case)], row.output))


class _CaseArbitrator:
    """One case: the outputs of all that ran it."""

    def __init__(
        self, arbitrator: Arbitrator, definition: Definition, op: Op, planned: PlannedCase, rows: Rows
    ) -> None:
        self._definition, self._op, self._planned, self._rows = definition, op, planned, rows
        self._dataset = arbitrator.dataset
        self._store = arbitrator.outputs
        self._expected_record = arbitrator.oracle.get(planned.id)
        inputs = None if self._expected_record is None else self._expected_record.inputs
        here = {actor: cases.get(planned.id) for actor, cases in arbitrator.records.items()}
        self._ran = {  # of a large case the judge has drawn the inputs itself; see large.py
            actor: record
            for actor, record in here.items()
            if record is not None and record.status == "ok" and (planned.large or record.inputs == inputs)
        }

    @cached_property
    def _oracle(self) -> dict[str, dict[str, torch.Tensor]]:
        kept = None if self._planned.large else self._expected_record
        return entries_of(self._store, kept, self._definition)

    @cached_property
    def _outputs(self) -> dict[str, dict[str, torch.Tensor]]:
        """What each actor gave; read when a case is in dispute, which most are not."""
        return {
            actor: self._store.tensors(str(record.key), record.as_json()) for actor, record in self._ran.items()
        }

    def _expected(self, output: str) -> Expected:
        return expectation(self._definition, self._op, self._planned.case, output, self._oracle[output])

    def _apart(self, one: str, other: str, output: str) -> float | None:
        return agree(self._outputs[one].get(output), self._outputs[other].get(output), self._expected(output))

    def _passed(self, output: str) -> list[str]:
        """Actors whose output passed."""
        return [row.actor for row in self._rows if row.output == output and row.verdict == Verdict.PASS]

    def pairs(self) -> Rows:
        """A row for each output of two ground truths that passed by themselves: how far they lie apart."""
        found: Rows = []
        if not self._ran:
            return found
        comparisons = self._op.comparisons(self._definition)
        axes = self._planned.case.axes
        for output, spec in self._definition.outputs.items():
            if isinstance(comparisons.get(output), Samples | IndexSet):
                continue  # sets and draws do not lie apart by an amount
            elements = math.prod(self._definition.shape_of(spec, axes) or ())
            passed = [truth for truth in TRUTHS if truth in self._passed(output) and truth in self._ran]
            for one, other in combinations(passed, 2):
                if elements > HELD_APART:
                    found.append(self._pair(one, other, output, self._bound(one, other, output), "at most "))
                    continue
                apart = self._apart(one, other, output)
                if apart is not None:
                    found.append(self._pair(one, other, output, apart))
        return found

    def _bound(self, one: str, other: str, output: str) -> float:
        """What two answers' own errors leave between them: half the sum of their margins."""
        gates = (self._row(actor, output).gate for actor in (one, other))
        return sum(gate.margin for gate in gates if gate is not None and gate.margin is not None) / 2

    def _row(self, actor: str, output: str) -> VerdictRow:
        return next(row for row in self._rows if row.actor == actor and row.output == output)

    def _pair(self, one: str, other: str, output: str, apart: float, about: str = "") -> VerdictRow:
        row = self._row(one, output)
        matches = apart <= 1
        found = "match" if matches else "differ"
        return VerdictRow(
            definition=row.definition,
            op_type=row.op_type,
            case=row.case,
            size=row.size,
            seed=row.seed,
            axes=row.axes,
            actor=f"{one}{PAIR}{other}",
            against=other,
            output=output,
            verdict=Verdict.PASS if matches else Verdict.FAIL,
            reason=None if matches else Failure.NUMERICS,
            message=f"ground truths {found}: half of what parts them is {about}{apart:.3g} of the limit",
            gate=GateResult(kind="pair", margin=apart if math.isfinite(apart) else None),
            repeat=row.repeat,
        )

    def arbitrate(self, row: VerdictRow, *, explaining: bool) -> VerdictRow:
        """A failing row that says who agrees with whom, who is in the minority, and what the answer looks like."""
        actor, output = row.actor, row.output
        if actor not in self._ran or not self._oracle[output]:
            return row
        others = [other for other in self._ran if other != actor]
        apart = {other: self._apart(actor, other, output) for other in others}
        passed = self._passed(output)
        near = (
            other for other, value in apart.items() if value is not None and value <= 1 and other not in passed
        )
        ours, theirs = sorted([actor, *near]), [ORACLE, *sorted(passed)]
        outvoted = ours if len(ours) < len(theirs) else theirs if len(theirs) < len(ours) else []
        recognised = self._explained(output, actor) if explaining else []
        told = "".join(f"; {text}" for text in (_told(ours, theirs, outvoted), *recognised))
        sides = {"ours": ours, "theirs": theirs, "outvoted": outvoted, "recognised": recognised}
        found = Arbitration.model_validate(sides)
        return row.changed(message=row.message + told, arbitration=found)

    def _explained(self, output: str, actor: str) -> list[str]:
        case = self._planned.case
        dataset = Path(self._dataset)
        inputs = make_inputs(self._op, self._definition, case, device=torch.device("cpu"), dataset=dataset)
        subject = Subject(
            definition=self._definition,
            op=self._op,
            case=case,
            inputs=inputs,
            oracle={
                f"{name}@{what}" if what else name: value
                for name, entries in self._oracle.items()
                for what, value in entries.items()
            },
            seed=case.seed,
        )
        return explain(subject, output, self._outputs[actor][output], self._expected(output))


def _told(ours: Sequence[str], theirs: Sequence[str], outvoted: Sequence[str]) -> str:
    if len(ours) == 1 and len(theirs) == 1:
        return "no other implementation to compare with"
    sides = f"{', '.join(ours)} against {', '.join(theirs)}"
    return f"{sides}: {', '.join(outvoted)} in the minority" if outvoted else f"{sides}: undecided"
