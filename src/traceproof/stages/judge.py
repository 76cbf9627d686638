"""Judge: every actor's outputs against the oracle's, one verdict row an output, one file an op_type."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.judge.output import Ruling, judge_output
from traceproof.ops import registry
from traceproof.ops.base import Op
from traceproof.reasons import Error, Failure, Skip, Verdict
from traceproof.stages.dispute import WHOLE, Dispute, entries_of, expectation
from traceproof.stages.manifest import Manifest
from traceproof.stages.replay import Bundles
from traceproof.store import Store, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a judge needs beside the cases.

    Attributes:
        outputs, judged: where outputs and finished rows lie.
        code: digest of the judge's own code and the ops'.
        tolerance: overrides the atol and rtol of the specification's rows.
    """

    outputs: Store
    judged: Store
    code: str
    tolerance: float | None


def judge(cases: Path, manifests: Sequence[Path], verdicts: Path, bench: Bench) -> None:
    """Write the verdict rows of one op_type, one JSON object a line, in a fixed order.

    A definition whose outputs, code and tolerance were judged before is not judged again.

    Raises:
        TraceproofError: the disk is full.
    """
    planned = json.loads(cases.read_text(encoding="utf-8"))
    read = {manifest.actor: manifest for manifest in map(Manifest.read, manifests)}
    oracle = read.pop("oracle")
    lines = [_broken_row(planned["op_type"], broken) for broken in planned["broken"]]
    run = verdicts.parent.parent
    bundles = Bundles(run, run / "replay" / planned["op_type"], bench.outputs)
    bundles.clear()
    for name, entry in planned["definitions"].items():
        rows = [row for actor in sorted(read) for row in _definition_rows(name, entry, read[actor], oracle, bench)]
        dispute = Dispute(
            entry=entry,
            oracle=oracle.cases.get(name, {}),
            records={actor: manifest.cases.get(name, {}) for actor, manifest in read.items()},
            outputs=bench.outputs,
            judged=bench.judged,
            code=bench.code,
            dataset=planned["dataset"],
        )
        rows = dispute.arbitrated(rows)
        bundles.write(rows, entry, dispute)
        lines += rows
    write_text(verdicts, "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines))


def _broken_row(op_type: str, broken: Mapping[str, str]) -> dict[str, Any]:
    return {
        "definition": Path(broken["path"]).stem,
        "op_type": op_type,
        "case": None,
        "actor": "reference",
        "against": None,
        "output": WHOLE,
        "verdict": Verdict.ERROR,
        "reason": Error.DEFINITION,
        "message": broken["message"],
        "path": broken["path"],
    }


def _definition_rows(
    name: str, entry: Mapping[str, Any], manifest: Manifest, oracle: Manifest, bench: Bench
) -> list[dict[str, Any]]:
    """All rows of one definition and one actor, from the store when nothing they depend on has changed."""
    records = manifest.cases.get(name, {})
    expected = oracle.cases.get(name, {})
    key = digest_json(
        {
            "definition": entry["digest"],
            "cases": [[planned["digest"], planned["skip"], planned["repeat"]] for planned in entry["cases"]],
            "actor": [manifest.actor, _essence(records)],
            "oracle": [entry["no_oracle"], _essence(expected)],
            "code": bench.code,
            "tolerance": bench.tolerance,
        }
    )
    known = bench.judged.record(key)
    if known is None:
        definition = Definition.model_validate(entry["definition"])
        op, _ = registry.for_definition(definition)
        rows: list[dict[str, Any]] = []
        for planned in entry["cases"]:
            judged = _CaseJudge(definition, op, planned, manifest, bench)
            case_id = planned["case"]["id"]
            rows += judged.rows(records.get(case_id), expected.get(case_id))
        known = {"rows": rows}
        bench.judged.finish(key, known)
    return list(known["rows"])


def _essence(records: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    return [
        [case, {k: v for k, v in record.items() if k not in {"seconds", "peak_bytes", "cached"}}]
        for case, record in records.items()
    ]


@dataclass(frozen=True, slots=True)
class _CaseJudge:
    definition: Definition
    op: Op
    planned: Mapping[str, Any]
    manifest: Manifest
    bench: Bench

    def rows(self, record: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Rows of one case: one if there is nothing to compare, else one an output and one a broken rule."""
        if self.planned["skip"] is not None:
            skip = self.planned["skip"]
            return [self._row(WHOLE, Ruling(Verdict.SKIP, skip["reason"], skip["message"], {}), record)]
        if record is None:
            missing = f"{self.manifest.actor} left no record of this case; run again"
            return [self._row(WHOLE, Ruling(Verdict.ERROR, Error.CRASH, missing, {}), record)]
        if record["status"] != "ok":
            verdict = Verdict.SKIP if record["status"] == "skip" else Verdict.ERROR
            return [self._row(WHOLE, Ruling(verdict, record["reason"], record["message"], {}), record)]
        blocked = self._no_oracle(record, expected)
        if blocked is not None:
            return [self._row(WHOLE, blocked, record)]
        outputs = self.bench.outputs.tensors(record["key"])
        oracle = entries_of(self.bench.outputs, expected, self.definition)
        rows = []
        for name in self.definition.outputs:
            held = expectation(self.definition, self.op, self.planned, name, oracle)
            rows.append(
                self._row(name, judge_output(outputs.get(name), held, tolerance=self.bench.tolerance), record)
            )
        rows += [
            self._row(name, _surplus(name), record) for name in outputs if name not in self.definition.outputs
        ]
        return rows + [self._row(WHOLE, ruling, record) for ruling in _conduct(record)]

    @staticmethod
    def _no_oracle(record: Mapping[str, Any], expected: Mapping[str, Any] | None) -> Ruling | None:
        if expected is None or (expected["status"] == "skip" and expected["reason"] == Skip.NO_ORACLE):
            return None
        if expected["status"] == "skip":
            return Ruling(Verdict.SKIP, expected["reason"], f"the oracle: {expected['message']}", {})
        if expected["status"] != "ok":
            return Ruling(Verdict.ERROR, Error.ORACLE, f"the oracle: {expected['message']}", {})
        if expected["inputs"] != record["inputs"]:
            differ = f"inputs {record['inputs']} were seen, the oracle saw {expected['inputs']}"
            return Ruling(Verdict.ERROR, Error.INPUTS_DIFFER, differ, {})
        return None

    def _row(self, output: str, ruling: Ruling, record: Mapping[str, Any] | None) -> dict[str, Any]:
        case = self.planned["case"]
        name = self.definition.name
        environment = self.manifest.environment
        return {
            "definition": name,
            "op_type": self.definition.op_type,
            "case": case["id"],
            "size": case["size"],
            "seed": case["seed"],
            "axes": case["axes"],
            "actor": self.manifest.actor,
            "against": "oracle",
            "output": output,
            "verdict": ruling.verdict,
            "reason": ruling.reason,
            "message": ruling.message,
            **ruling.details,
            "digests": {
                "definition": self.definition.digest,
                "case": self.planned["digest"],
                "inputs": (record or {}).get("inputs"),
                "outputs": (record or {}).get("key"),
                "code": self.manifest.code,
                "environment": environment.get("digest"),
            },
            "versions": environment.get("versions"),
            "device": environment.get("device"),
            "repeat": f"traceproof verify --definition-name {name} --case {case['id']} --seed {case['seed']}",
        }


def _surplus(name: str) -> Ruling:
    return Ruling(Verdict.FAIL, Failure.PRESENCE, f"{name} is no output of the definition", {})


def _conduct(record: Mapping[str, Any]) -> Iterable[Ruling]:
    """What the actor did beside computing: changed inputs, aliased outputs, varying or remembered answers."""
    if record.get("mutated"):
        yield Ruling(Verdict.FAIL, Failure.MUTATION, f"modified its inputs {record['mutated']}", {})
    if record.get("aliased"):
        yield Ruling(Verdict.FAIL, Failure.ALIAS, f"outputs {record['aliased']} share memory with others", {})
    if record.get("subclassed"):
        yield Ruling(Verdict.FAIL, Failure.SUBCLASS, f"outputs {record['subclassed']} are no plain tensors", {})
    if "varying" not in record:
        return
    if record["varying"]:
        differing = f"a second run on the same inputs gave other bits in {record['varying']}"
        yield Ruling(Verdict.FAIL, Failure.DETERMINISM, differing, {})
    else:
        yield Ruling(Verdict.PASS, None, "a second run gave the same bits", {"gate": {"kind": "determinism"}})
    if record["remembered"]:
        yield Ruling(Verdict.FAIL, Failure.CACHED, "other inputs gave the same bits in every output", {})
