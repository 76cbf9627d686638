"""The verdicts on a stack's ground truths for some definitions, with the package taken from a given folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from traceproof import programs
from traceproof.environments.building import probe
from traceproof.errors import TraceproofError
from traceproof.files import sealed, write_json, write_text
from traceproof.programs import without_secrets
from traceproof.run.flow import Pipeline
from traceproof.run.implementations import for_op_type
from traceproof.run.rows import VerdictRow, read_rows
from traceproof.stacks import MAIN, truths_of


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Definitions of one op_type and the ground truths of one stack: planned once, judged for each package."""

    flow: Pipeline  # the configuration
    root: Path  # the repository of traceproof
    # definitions, op_type, stack: what is tried
    definitions: tuple[str, ...]
    op_type: str
    stack: str
    work: Path  # a folder for plans, verdicts and what is compiled
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment of everything that is run
    truths: tuple[str, ...] = ()  # ground truths that are run; empty: all of the stack

    def rows(self, package: Path | None, name: str) -> list[VerdictRow]:
        """The verdicts on the ground truths in `package`, or, where it is None, on the installed ones.

        `name` is the package's among those that are tried. Raises TraceproofError: it could not be judged.
        """
        place = self.work / name
        environments = {
            MAIN: self._main,
            self.stack: self._environment(self.stack, package) | {"variables": dict(self.variables)},
        }
        write_json(place / "environments.json", environments)
        options = {
            "cases": self._cases,
            "verdicts": place / "verdicts.jsonl",
            "cache": self.work / "cache.sqlite",
            "caches": self.work / "compiled",
            "environments": place / "environments.json",
            "implementations": [
                truth for truth in self.truths or truths_of(self.stack) if truth in for_op_type(self.op_type)
            ],
            "limits": self.flow.limits,
            "tolerance": self.flow.tolerance,
        }
        self._run("verify", options)
        return read_rows(place / "verdicts.jsonl")

    @cached_property
    def _cases(self) -> Path:
        selection = {**json.loads(self.flow.selection), "op_types": [], "definitions": list(self.definitions)}
        write_text(self.work / f"{MAIN}.json", sealed(json.dumps(self._main["record"], indent=1)))
        out = self.work / "cases" / "index.json"
        options = {
            "dataset": self.flow.dataset,
            "stack": self.work / f"{MAIN}.json",
            "selection": json.dumps(selection),
            "results": self.root / self.flow.results,
            "out": out,
        }
        self._run("cases", options)
        return out.with_name(f"{self.op_type}.json")

    @cached_property
    def _main(self) -> dict[str, Any]:
        return self._environment(MAIN, None)

    def _environment(self, stack: str, package: Path | None) -> dict[str, Any]:
        """An environment as `scripts/verify.py` takes it."""
        path = [] if package is None else [package]
        record = probe(self.flow.stacks[stack], root=self.root, path=path)
        return {"python": str(self.root / self.flow.python(stack)), "record": record, "path": list(map(str, path))}

    def _run(self, script: str, options: Mapping[str, object]) -> None:
        arguments = ["-P", str(self.root / "scripts" / f"{script}.py"), "--log", str(self.work / f"{script}.log")]
        for key, value in options.items():
            arguments += [f"--{key}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        command = [str(self.root / self.flow.python(MAIN)), *arguments]
        environment = {**without_secrets(), **self.variables, "PYTHONPATH": str(self.root / "src")}
        done = programs.run(command, environment=environment, cwd=self.root)
        if done.returncode:
            raise TraceproofError(
                f"{self.op_type}: {' '.join(command[:3])} ... ended with {done.returncode}",
                problems=programs.last_lines(done.stderr),
            )


def worst(rows: Sequence[VerdictRow]) -> str:
    """The verdict that counts: the worst one, and `skip` only if nothing was compared."""
    seen = {row.verdict for row in rows}
    return next((verdict for verdict in ("error", "fail", "pass") if verdict in seen), "skip")
