"""Judges one definition after the other, in a worker."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from traceproof.errors import TraceproofError
from traceproof.execution.case import expectation
from traceproof.judge.output import Ruling, judge_output, misconduct, surplus
from traceproof.ops import registry
from traceproof.pipeline.records import ORACLE, REFERENCE, SHADOW, WHOLE, PlannedCase
from traceproof.pipeline.rows import RowDigests, VerdictRow
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.arbitrator import Arbitrator, entries_of
from traceproof.pipeline.stages.grades import graded
from traceproof.pipeline.stages.judge_settings import JudgeSettings
from traceproof.pipeline.stages.large import LargeCases, Rulings
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.pipeline.stages.to_judge import DAMAGED, ToJudge
from traceproof.reasons import Error, Failure, Skip, Verdict
from traceproof.store import DamagedError

Rows = list[VerdictRow]


def setup(payload: dict[str, Any], scratch: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Called once in a worker; the result judges a definition per call, `to_judge`, whose rows get `options`.

    `payload` has `settings` and `threads`. What is written goes to the store.
    """
    del scratch
    torch.set_num_threads(payload["threads"])
    settings = JudgeSettings.of_json(payload["settings"])

    def run(item: dict[str, Any]) -> dict[str, Any]:
        try:
            rows = definition_rows(ToJudge.model_validate(item["to_judge"]), settings)
            return {"rows": [row.changed(repeat=row.command(item["options"])).as_json() for row in rows]}
        except TraceproofError as error:
            return error.as_json() | {DAMAGED: isinstance(error, DamagedError)}

    return run


def definition_rows(one: ToJudge, settings: JudgeSettings) -> Rows:
    """Verdict rows of one definition; those of an actor that were judged before, by the same code, are kept.

    Raises TraceproofError: the disk is full. DamagedError: outputs are not what was written.
    """
    entry, definition = one.entry, one.entry.parsed
    large = LargeCases(
        definition=definition,
        op=registry.for_definition(definition)[0],
        records=one.others,
        outputs=settings.outputs,
        dataset=one.dataset,
        tolerance=settings.tolerance,
        device=settings.device,
    )
    rows = [row for manifest in one.manifests for row in _actor_rows(one, manifest, settings, large)]
    arbitrator = Arbitrator(
        entry=entry,
        oracle=one.oracle,
        records=one.others,
        outputs=settings.outputs,
        dataset=one.dataset,
        tolerance=settings.tolerance,
    )
    return graded(arbitrator.arbitrated(rows))


def _actor_rows(one: ToJudge, manifest: Manifest, settings: JudgeSettings, large: LargeCases) -> Rows:
    """All rows of one definition and one actor, from the store when nothing they depend on has changed."""
    entry, records, expected = one.entry, manifest.of(one.name), one.oracle
    key = one.key(settings, manifest.actor)
    known = settings.judged.record(key)
    if known is not None:
        return [VerdictRow.model_validate(row) for row in known["rows"]]
    rows: Rows = []
    for planned in entry.cases:
        if planned.hidden and manifest.actor != REFERENCE:
            continue
        judged = _CaseJudge(
            large, planned, manifest, settings, shadowed=entry.no_oracle is not None, twin=entry.twin
        )
        rows += judged.rows(records.get(planned.id), expected.get(planned.id))
    settings.judged.finish(key, {"rows": [row.as_json() for row in rows]})
    return rows


@dataclass(frozen=True, slots=True)
class _CaseJudge:
    large: LargeCases
    planned: PlannedCase
    manifest: Manifest
    settings: JudgeSettings
    shadowed: bool = False  # whether the reference's shadow stands in for an oracle
    twin: str = ""  # which axes are smaller than the definition's

    def rows(self, record: RunRecord | None, expected: RunRecord | None) -> Rows:
        """Rows of one case: one if there is nothing to compare, else one an output and one a broken rule."""
        skip = self.planned.skip
        if skip is not None:
            return [self._row(WHOLE, Ruling(Verdict.SKIP, skip.reason, skip.message, {}), record)]
        if record is None:
            missing = f"{self.manifest.actor} left no record of this case; run again"
            return [self._row(WHOLE, Ruling(Verdict.ERROR, Error.CRASH, missing, {}), record)]
        if self.twin and record.reason == Error.EXCEPTION:  # nobody says that it takes sizes other than its own
            raised = (record.message.strip().splitlines() or ["an exception"])[-1]
            refused = f"it does not take the sizes of a smaller twin ({self.twin}): {raised}"
            return [self._row(WHOLE, Ruling(Verdict.SKIP, Skip.DOES_NOT_FIT, refused, {}), record)]
        if record.status != "ok":
            verdict = Verdict.SKIP if record.status == "skip" else Verdict.ERROR
            return [self._row(WHOLE, Ruling(verdict, record.reason, record.message, {}), record)]
        blocked = self._no_oracle(record, expected)
        if blocked is not None:
            return [self._row(WHOLE, blocked, record)]
        if self.planned.large:
            rulings = self.large.rulings(self.planned, self.manifest.actor)
        else:
            rulings = self._rulings(record, expected)
        rulings = {**rulings, **{name: surplus(name) for name in record.surplus}}
        rows = [self._row(name, ruling, record) for name, ruling in rulings.items()]
        return rows + [self._row(WHOLE, ruling, record) for ruling in _conduct(record)]

    def _rulings(self, record: RunRecord, expected: RunRecord | None) -> Rulings:
        """Rulings on the outputs of a case whose oracle's entries are in the store."""
        definition, op = self.large.definition, self.large.op
        outputs = self.settings.outputs.tensors(str(record.key), record.as_json())
        oracle = entries_of(self.settings.outputs, expected, definition)
        found = {}
        for name, spec in definition.outputs.items():
            if spec.optional and name not in outputs:
                continue
            held = expectation(
                definition, op, self.planned.case, name, oracle[name], reference=self.manifest.actor == REFERENCE
            )
            ruling = judge_output(outputs.get(name), held, tolerance=self.settings.tolerance)
            if ruling.reason == Skip.NO_ORACLE and expected is not None and expected.shadow:
                ruling = replace(ruling, message=f"{ruling.message}; no float64 shadow: {expected.shadow}")
            found[name] = ruling
        extra = [name for name in outputs if "@" not in name and name not in definition.outputs]
        return found | {name: surplus(name) for name in extra}

    def _no_oracle(self, record: RunRecord, expected: RunRecord | None) -> Ruling | None:
        if self.shadowed and (expected is None or expected.status != "ok"):
            return None
        if expected is None or (expected.status == "skip" and expected.reason == Skip.NO_ORACLE):
            return None
        if expected.status == "skip":
            return Ruling(Verdict.SKIP, expected.reason, f"the oracle: {expected.message}", {})
        if expected.status != "ok":
            return Ruling(Verdict.ERROR, Error.ORACLE, f"the oracle: {expected.message}", {})
        if not self.planned.large and expected.inputs != record.inputs:
            differ = f"inputs {record.inputs} were seen, the oracle saw {expected.inputs}"
            return Ruling(Verdict.ERROR, Error.INPUTS_DIFFER, differ, {})
        return None

    def _row(self, output: str, ruling: Ruling, record: RunRecord | None) -> VerdictRow:
        case = self.planned.case
        definition = self.large.definition
        environment = self.manifest.environment
        weak = record.isolation if record is not None else ""
        own = {name: value for name, value in (("isolation", weak), ("twin", self.twin)) if value}
        further: dict[str, Any] = {**own, **ruling.details}
        return VerdictRow(
            definition=definition.name,
            op_type=definition.op_type,
            case=case.id,
            size=case.size,
            seed=case.seed,
            axes=dict(case.axes),
            actor=self.manifest.actor,
            against=SHADOW if self.shadowed else ORACLE,
            output=output,
            verdict=ruling.verdict,
            reason=ruling.reason,
            message=ruling.message + (f"; isolation was weak: it could reach {weak}" if weak else ""),
            **further,
            digests=RowDigests(
                definition=definition.digest,
                case=self.planned.digest,
                inputs=record.inputs if record is not None else None,
                outputs=record.key if record is not None else None,
                code=self.manifest.code,
                environment=environment.get("digest"),
            ),
            versions=environment.get("versions"),
            device=environment.get("device"),
            repeat=self.planned.hidden or f"--seed {case.seed}",
        )


def _conduct(record: RunRecord) -> Iterable[Ruling]:
    """What the actor did beside computing: changed inputs, aliased outputs, varying or remembered answers."""
    yield from misconduct(mutated=record.mutated, aliased=record.aliased, subclassed=record.subclassed)
    if record.varying is None:
        return
    if record.varying:
        differing = f"a second run on the same inputs gave other bits in {list(record.varying)}"
        yield Ruling(Verdict.FAIL, Failure.DETERMINISM, differing, {})
    else:
        yield Ruling(Verdict.PASS, None, "a second run gave the same bits", {"gate": {"kind": "determinism"}})
    if record.remembered:
        yield Ruling(Verdict.FAIL, Failure.CACHED, "other inputs gave the same bits in every output", {})
