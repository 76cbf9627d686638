"""Runs generated tests in a stack's environment: pytest in workers, a file per definition, a row per test."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from traceproof.errors import TraceproofError
from traceproof.files import own_folder, write_text
from traceproof.programs import telling
from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import Limits
from traceproof.sandbox.model import Reply, Status
from traceproof.stacks import MAIN
from traceproof.testgen.generate import state

MESSAGE_CHARACTERS = 4000
OUTPUT_CHARACTERS = 2000
USAGE = 2  # the first of pytest's exit codes for a broken run: internal error, usage error or no tests

Outcome = Literal["passed", "failed", "skipped", "error"]


class TestRow(TypedDict):
    """Result of one test: `test` is its function, `case` the case's id or empty."""

    test: str
    case: str
    outcome: Outcome
    message: str
    seconds: float


def setup(payload: dict[str, Any]) -> Callable[[str], tuple[list[TestRow], str]]:
    """Prepare a worker for pytest; returns run(definition), which runs test_<definition>.py.

    `run` returns (a row per test, and why pytest broke off or found no test, or ""). The payload: `scratch`, a
    folder of this worker; `folder` of the test files; pytest's `options`; environment `variables`.
    """
    scratch = Path(payload["scratch"])
    os.chdir(scratch)
    os.environ.update(payload["variables"], PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.dont_write_bytecode = True  # the worker can not write to the tests' folder

    def run(name: str) -> tuple[list[TestRow], str]:
        import pytest

        plugin = _Collector()
        settings = scratch / "pytest.ini"
        settings.write_text("[pytest]\n", encoding="utf-8")  # else pytest reads the settings of a project above
        folder = Path(payload["folder"])  # the sandbox may hide the folders above it
        options = [f"--config-file={settings}", f"--rootdir={folder}", f"--confcutdir={folder}"]
        options += ["-p", "no:cacheprovider", f"--basetemp={scratch / 'pytest'}", *payload["options"]]
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            code = pytest.main([str(folder / f"test_{name}.py"), *options], plugins=[plugin])
        rows, problem = list(plugin.rows.values()), output.getvalue()[-OUTPUT_CHARACTERS:] if code >= USAGE else ""
        return rows, problem or ("" if rows else "no test was collected")

    return run


class _Collector:
    """A pytest plugin that keeps one row per test: its worst phase."""

    def __init__(self) -> None:
        self.rows: dict[str, TestRow] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's report
        """Add a phase to its test's row: its seconds, and outcome and message if it did not pass."""
        test, _, case = report.nodeid.rpartition("::")[2].partition("[")
        new = TestRow(test=test, case=case.removesuffix("]"), outcome="passed", message="", seconds=0.0)
        row = self.rows.setdefault(report.nodeid, new)
        row["seconds"] += report.duration
        if report.outcome != "passed":
            broken = report.outcome == "failed" and report.when != "call"
            row["outcome"] = "error" if broken else report.outcome
            longrepr = report.longrepr
            text = longrepr[2].removeprefix("Skipped: ") if isinstance(longrepr, tuple) else str(longrepr or "")
            half = MESSAGE_CHARACTERS // 2  # a report starts with the failure, a traceback ends with it
            row["message"] = text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"


SETUP = "traceproof.testgen.running:setup"
BAD = frozenset({"failed", "error"})
SHOWN = 20  # failures listed in a table or log; the file of rows has all
WHOLE = "(the whole file)"  # in place of a test's name, if the worker's end or pytest's error is about all of them


class DefinitionTestRow(TestRow):
    """A test's row with its definition, the definition's digest, and the stack whose environment ran it."""

    op_type: str
    stack: str
    definition: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTypeTests:
    """The tests of one op_type in one stack."""

    folder: Path  # of the generated test files
    # op_type, stack: their names
    op_type: str
    stack: str
    dataset: Path  # of the definitions that the tests read
    digests: Mapping[str, str]  # planned definition -> digest
    options: Sequence[str]  # more options of pytest
    limits: Limits  # for one definition's tests together
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables


@dataclass(slots=True)
class _Progress:
    """Counts definitions whose tests have ended; str() of it is a line of progress."""

    label: str
    total: int
    done: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.label:24}  tests of {len(self.done)}/{self.total} definitions"


def run_tests(
    order: OpTypeTests, environment: Environment, *, caches: Path | None = None, parallel: int = 1
) -> Iterator[DefinitionTestRow]:
    """Run the tests of planned definitions that have a file, `parallel` at once; yields a row per test.

    The tests were generated just before, so they are trusted; the references that they run are isolated. `caches`
    is for compiled files. Raises TraceproofError: a file differs from its generated form, or no worker starts.
    """
    states = {name: state(order.folder / f"test_{name}.py") for name in order.digests}
    names = sorted(name for name, origin in states.items() if origin != "absent")  # some names can not be a file's
    for name in names:
        if states[name] != "ours":
            todo = "Generate it again: `snakemake --forcerun tests`."
            raise TraceproofError(f"{order.folder / f'test_{name}.py'} is not as it was generated", todo=todo)
    parallel = max(1, min(parallel, len(names)))
    options = [*order.options, f"--dataset={order.dataset.absolute()}"]
    if order.stack != MAIN:  # elsewhere than in torch's environment, only what needs the stack's package
        options += ["-k", f"vs_{order.stack} or ground_truths_match"]
    shared = {"folder": str(order.folder.absolute()), "options": options, "variables": dict(order.variables)}
    progress = _Progress(order.op_type, len(names))
    with own_folder() as scratch, ThreadPoolExecutor(parallel) as threads, telling(progress):

        def share(number: int) -> dict[str, list[TestRow]]:
            folder = scratch / str(number)
            folder.mkdir()
            payload = {"scratch": str(folder), **shared}
            found = {}
            with Worker(environment, SETUP, payload, order.limits, caches=caches) as worker:
                for name in names[number::parallel]:
                    found[name] = _test_rows(worker.ask(name))
                    progress.done.append(name)
            return found

        rows = {name: answers for part in threads.map(share, range(parallel)) for name, answers in part.items()}
    for name in names:
        for row in rows[name]:
            yield DefinitionTestRow(
                **row, op_type=order.op_type, stack=order.stack, definition=name, digest=order.digests[name]
            )


def _test_rows(reply: Reply) -> list[TestRow]:
    """Rows from a worker's reply, and one for the whole file if it did not run to its end."""
    rows, problem = reply.value if reply.status is Status.OK else ([], f"{reply.status}: {reply.message}")
    whole = TestRow(test=WHOLE, case="", outcome="error", message=problem, seconds=reply.seconds)
    return [*rows, whole] if problem else rows


def failure_line(row: DefinitionTestRow) -> str:
    """A failed test, its case and stack, and the line of the message with the cause."""
    where = f"{row['test']}[{row['case']}]" if row["case"] else row["test"]
    lines = [line for line in row["message"].splitlines() if line.strip(" =_")] or [""]
    cause = lines[-1 if row["outcome"] == "error" else 0]  # a traceback ends with it, a report starts with it
    return f"{row['outcome'].upper()} {row['definition']} {where} in {row['stack']}: {cause}"


def write_rows(rows: Iterable[DefinitionTestRow], path: Path) -> None:
    """Write rows, one JSON object per line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_rows(paths: Iterable[Path]) -> list[DefinitionTestRow]:
    """The rows in some files."""
    # as bytes: text has more ends of lines, which a message may hold
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]
