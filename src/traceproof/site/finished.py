"""A finished run as the site reads it: summary, plans, verdict rows, kept states, an audit of tests."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.publish.ledger import read_dates
from traceproof.run.records import OpTypePlan
from traceproof.run.report import read_summary
from traceproof.run.rows import VerdictRow, each_row

AUDIT = "audit-tests.json"  # below results: where `traceproof audit-tests --json` is looked for

FindingKey = tuple[str, str | None, str, str]  # definition, case, actor, output


@dataclass(frozen=True)
class Finished:
    """A run's folder and the results folder that it lies in."""

    results: Path  # with `history/` and `stacks/`
    run: Path  # with `summary.json`, `cases/` and `verdicts/`; `results` itself for the whole dataset
    audit: Path | None = None  # what `traceproof audit-tests --json` wrote; None: no result of it exists

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What the rule `report` wrote. Raises TraceproofError: there is none, or it is of other verdicts."""
        if not (self.run / "summary.json").is_file():
            problem = (
                f"no run has ended with a report in {self.run}: none was started there, or it was interrupted"
            )
            todo = (
                "Run `traceproof verify`, which goes on from what is finished, or name a folder with --selection."
            )
            raise TraceproofError("there is no finished run to show", problems=[problem], todo=todo)
        try:
            return read_summary(self.run / "summary.json")
        except TraceproofError as error:
            raise TraceproofError(
                error.what, problems=error.problems, todo="Run `traceproof verify` again."
            ) from error

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
        return sorted({path.name.partition(".")[0] for path in (self.run / "verdicts").glob("*.jsonl")})

    def plan(self, op_type: str) -> OpTypePlan:
        """What was planned of an op_type."""
        return OpTypePlan.read(self.run / "cases" / f"{op_type}.json")

    def verdicts(self, op_type: str) -> Iterator[tuple[str, list[VerdictRow]]]:
        """The rows of one definition after the other. Raises TraceproofError: one's rows stand in two places."""
        seen = set()
        for path in sorted((self.run / "verdicts").glob(f"{op_type}.*jsonl")):  # a large one's in several files
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
        return self._dates.get(key, "")

    @cached_property
    def _dates(self) -> Mapping[str, str]:
        return read_dates(self.results)

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
