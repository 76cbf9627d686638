"""The verdict of a stack's ground truths on some definitions, with the package taken from a given folder."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from traceproof import programs
from traceproof.actors.registry import for_op_type
from traceproof.bumps.keys import keyed
from traceproof.digests import digest_json
from traceproof.environments.building import has_driver
from traceproof.errors import TraceproofError
from traceproof.owner import Owner
from traceproof.pipeline.flow import Pipeline
from traceproof.pipeline.rows import VerdictRow, read_rows
from traceproof.stacks import MAIN, truths_of
from traceproof.store import write_json
from traceproof.untrusted.tokens import without_secrets
from traceproof.worker.shared import RUN

INSTALLED = "import json; from traceproof.environments.probe import installed; print(json.dumps(installed()))"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Definitions of one op_type and the ground truths of one stack."""

    flow: Pipeline  # the configuration; its store is shared with ordinary runs, so the oracle is rarely run
    root: Path  # the repository of traceproof
    # definitions, op_type, stack: what is tried
    definitions: tuple[str, ...]
    op_type: str
    stack: str
    work: Path  # a folder for plans and verdicts
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment of everything that is run
    truths: tuple[str, ...] = ()  # ground truths that are run; empty: all of the stack
    _environments: dict[str, dict[str, Any]] = field(default_factory=dict)  # what an interpreter is, by its path
    _runs: dict[Path, str] = field(default_factory=dict)  # by package: the run that shares workers which import it

    def verdict(self, package: Path, digest: str) -> dict[str, Any]:
        """What the ground truths in `package` are worth: `verdict` (the worst one) and `rows`.

        Raises TraceproofError: a stage could not run.
        """
        rows = self.rows(package, digest)
        return {"verdict": worst(rows), "rows": [row.as_json() for row in rows]}

    def rows(self, package: Path | None, digest: str) -> list[VerdictRow]:
        """The verdicts on the ground truths in `package`, or, where it is None, on the installed ones.

        `digest` is of the code that they can run, and keys their outputs. Raises TraceproofError: a stage could
        not run.
        """
        record = keyed(self._record(self.stack, package), digest)
        place = self.work / digest
        write_json(place / "stack.json", record)
        truths = [name for name in self.truths or truths_of(self.stack) if name in for_op_type(self.op_type)]
        with self._sharing(package):
            manifests = [self._actor(name, place / "stack.json", place, package) for name in truths]
        verdicts = place / "verdicts.jsonl"
        self._judge([self._oracle, *manifests], verdicts)
        return read_rows(verdicts)

    @cached_property
    def _cases(self) -> Path:
        selection = {**json.loads(self.flow.selection), "op_types": [], "definitions": list(self.definitions)}
        write_json(self.work / f"{MAIN}.json", self._record(MAIN, None))
        out = self.work / "cases"
        options = {
            "dataset": self.flow.dataset,
            "selection": json.dumps(selection),
            "out": out,
            "store": self._store,
            "store-gb": self.flow.store_gb,
            "actors": 2,
        }
        self._run("cases", MAIN, self.work / f"{MAIN}.json", options)
        return out / f"{self.op_type}.json"

    @cached_property
    def _oracle(self) -> Path:
        cases = self._cases
        del cases  # the record of the stack is written with them
        return self._actor("oracle", self.work / f"{MAIN}.json", self.work, None)

    def _actor(self, actor: str, record: Path, place: Path, package: Path | None) -> Path:
        manifest = place / f"{actor}.json"
        options = {
            "actor": actor,
            "cases": self._cases,
            "manifest": manifest,
            "store": self._store,
            "built": self._built(actor, record, place, package),
            "code": self.flow.outputs_code(self.op_type, actor),
            "limits": self.flow.limits,
            "lanes": 1,
        }
        self._run("actor", MAIN if actor == "oracle" else self.stack, record, options, package)
        return manifest

    def _built(self, actor: str, record: Path, place: Path, package: Path | None) -> list[Path]:
        """Build the kernel modules that the actor needs; what came of each, in one file or none."""
        if not self.flow.builds(self.op_type, actor):
            return []
        out = place / "jit.json"
        options = {"cases": self._cases, "out": out, "seconds": self.flow.config.limits.build_s}
        self._run("jit", self.stack, record, options, package)
        return [out]

    @property
    def _store(self) -> Path:
        return self.root / self.flow.results / "store"

    def _judge(self, manifests: list[Path], verdicts: Path) -> None:
        options = {
            "cases": self._cases,
            "manifests": manifests,
            "verdicts": verdicts,
            "store": self._store,
            "code": self.flow.judge_code(self.op_type),
            "tolerance": self.flow.tolerance,
            "threads": 1,
        }
        self._run("judge", MAIN, self.work / f"{MAIN}.json", options)

    def _record(self, stack: str, package: Path | None) -> dict[str, Any]:
        """The stack's record: the interpreter's, asked once, with versions that the package brings."""
        python = self.flow.python(stack)
        if python not in self._environments:
            said = self._python(stack, ["-P", "-m", "traceproof.environments.probe"], None)
            self._environments[python] = json.loads(said.splitlines()[-1])
        found = self._environments[python]
        if package is not None:  # a checkout or an unpacked release, which holds no torch
            versions = json.loads(self._python(stack, ["-P", "-c", INSTALLED], package).splitlines()[-1])
            found = found | {"versions": {**versions, "torch": found["versions"]["torch"]}}
        return {"stack": stack, **found, "digest": digest_json(found)}

    def _run(
        self, script: str, stack: str, record: Path, options: Mapping[str, object], package: Path | None = None
    ) -> None:
        """Run a script; the record, whose digest names its code, decides on the folder of what is compiled."""
        arguments = [str(self.root / "scripts" / f"{script}.py"), "--log", str(self.work / f"{script}.log")]
        for key, value in {**options, "stack": record, "caches": self.work / "compiled"}.items():
            arguments += [f"--{key}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        self._python(stack, arguments, package)

    @contextmanager
    def _sharing(self, package: Path | None) -> Iterator[None]:
        """Let the ground truths of one package share workers: a run that ends with this block."""
        if package is None:
            yield
            return
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as owner:  # until its input is closed
            self._runs[package] = Owner.of(owner.pid).text
            try:
                yield
            finally:
                del self._runs[package]

    def _python(self, stack: str, arguments: list[str], package: Path | None) -> str:
        path = [*([str(package)] if package is not None else []), str(self.root / "src")]
        environment = {**without_secrets(), **self.variables, "PYTHONPATH": os.pathsep.join(path)}
        # All trials share the workers that import no package, until this process ends.
        run = Owner.of(os.getpid()).text if package is None else self._runs.get(package)
        if run is not None and not has_driver():
            environment[RUN] = run
        command = [str(self.root / self.flow.python(stack)), *arguments]
        done = programs.run(command, environment=environment, cwd=self.root)
        if done.returncode:
            raise TraceproofError(
                f"{self.op_type}: {' '.join(command[:3])} ... ended with {done.returncode}",
                problems=programs.last_lines(done.stderr),
            )
        return done.stdout


def worst(rows: Sequence[VerdictRow]) -> str:
    """The verdict that counts: the worst one, and `skip` only if nothing was compared."""
    seen = {row.verdict for row in rows}
    return next((verdict for verdict in ("error", "fail", "pass") if verdict in seen), "skip")
