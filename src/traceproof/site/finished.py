"""A finished run as the site reads it: summary, plans, verdict rows, kept states, an audit of tests."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.pipeline.records import OpTypePlan
from traceproof.pipeline.rows import VerdictRow, each_row
from traceproof.pipeline.stages.standing import changed
from traceproof.store import Store, read_sealed
from traceproof.untrusted.border import BorderError

AUDIT = "audit-tests.json"  # below results: where `traceproof audit-tests --json` is looked for

FindingKey = tuple[str, str | None, str, str]  # definition, case, actor, output


@dataclass(frozen=True)
class Finished:
    """A run's folder and the results folder that it lies in."""

    results: Path  # with `history/` and `store/`
    run: Path  # with `summary.json`, `cases/` and `verdicts/`; `results` itself for the whole dataset
    audit: Path | None = None  # what `traceproof audit-tests --json` wrote; None: no result of it exists

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What the rule `report` wrote. Raises TraceproofError: there is none, or it is of other verdicts."""
        try:
            found = read_sealed(self.run / "summary.json")
        except (BorderError, OSError) as error:
            todo = "Run `traceproof verify` first, or name its folder with --selection."
            raise TraceproofError(f"{self.run} holds no finished run: {error}", todo=todo) from error
        other = changed(self.run, found)
        if other:
            todo = "Run `traceproof verify` again."
            raise TraceproofError(f"{self.run}/summary.json is of other files", problems=other[:10], todo=todo)
        return found

    @cached_property
    def findings(self) -> Mapping[FindingKey, str]:
        """`new`, `known` or `unexpected` for each row that is a finding."""
        return {
            (found["definition"], found["case"], found["actor"], found["output"]): kind
            for kind, rows in self.summary["findings"].items()
            for found in rows
        }

    @property
    def op_types(self) -> list[str]:
        """The op_types that have verdicts."""
        return sorted(path.stem for path in (self.run / "verdicts").glob("*.jsonl"))

    def plan(self, op_type: str) -> OpTypePlan:
        """What was planned of an op_type."""
        return OpTypePlan.read(self.run / "cases" / f"{op_type}.json")

    def verdicts(self, op_type: str) -> Iterator[tuple[str, list[VerdictRow]]]:
        """The rows of one definition after the other. Raises TraceproofError: one's rows stand in two places."""
        path, seen = self.run / "verdicts" / f"{op_type}.jsonl", set()
        for name, rows in groupby(each_row(path), key=lambda row: row.definition):
            if name in seen:
                raise TraceproofError(f"{path}: the rows of {name} stand in two places", todo="Verify again.")
            seen.add(name)
            yield name, list(rows)

    def stacks(self) -> Iterator[Mapping[str, str]]:
        """Name, device and package versions of each stack that has a record."""
        for path in sorted((self.results / "stacks").glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            versions = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
            yield {"name": str(record["stack"]), "device": str(record["device"]), "versions": versions}

    def first_written(self, key: str) -> str:
        """Day on which a ledger record was first published or tried to be; empty: it never was."""
        kept = Store(self.results / "store", "ledger").record(key)
        return "" if kept is None else str(kept["date"])

    def audited(self) -> dict[str, Any] | None:
        """The audit of tests. Raises TraceproofError: the file holds none."""
        if self.audit is None:
            return None
        try:
            value = json.loads(self.audit.read_text(encoding="utf-8"))
            return {name: value[name] for name in ("files", "tests", "collected", "not_run", "findings")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            todo = "Write it with `traceproof audit-tests FOLDER --json FILE`."
            raise TraceproofError(f"{self.audit} is no audit of tests: {error}", todo=todo) from error
