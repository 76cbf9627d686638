"""Run inside a worker: pytest over the generated tests of one definition, as typed rows."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Literal, TypedDict

MESSAGE_CHARACTERS = 4000
OUTPUT_CHARACTERS = 2000
USAGE = 2  # pytest's exit codes from here on: interrupted, broken, bad use, nothing collected

Outcome = Literal["passed", "failed", "skipped", "error"]


class TestRow(TypedDict):
    """What came of one test: `test` is its function, `case` the case's id or empty."""

    test: str
    case: str
    outcome: Outcome
    message: str
    seconds: float


class RunRequest(TypedDict):
    """What a worker is asked for: a test file, options of pytest, and variables of the environment."""

    scratch: str  # a folder of the worker's own
    file: str
    options: list[str]
    variables: dict[str, str]


class Answer(TypedDict):
    """One definition's rows; `problem` is what pytest said where it could not run them."""

    rows: list[TestRow]
    problem: str


def setup(payload: RunRequest) -> Callable[[str], Answer]:
    """Called once in a worker; the result runs one class of the test file per call."""
    scratch = Path(payload["scratch"])
    os.chdir(scratch)
    os.environ.update(payload["variables"], PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.dont_write_bytecode = True  # the tests' folder can not be written from here

    def run(name: str) -> Answer:
        import pytest

        plugin = _Collector()
        settings = scratch / "pytest.ini"
        settings.write_text("[pytest]\n", encoding="utf-8")  # else those of whatever project lies above
        folder = Path(payload["file"]).parent  # all above it may be hidden from here
        options = [f"--config-file={settings}", f"--rootdir={folder}", f"--confcutdir={folder}"]
        options += ["-p", "no:cacheprovider", f"--basetemp={scratch / 'pytest'}", *payload["options"]]
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = pytest.main([f"{payload['file']}::{name}", *options], plugins=[plugin])
        problem = said.getvalue()[-OUTPUT_CHARACTERS:] if code >= USAGE else ""
        return {"rows": list(plugin.rows.values()), "problem": problem}

    return run


class _Collector:
    """A pytest plugin that keeps one row per test: the worst of its phases."""

    def __init__(self) -> None:
        self.rows: dict[str, TestRow] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's report
        """Note what came of a phase."""
        row = self.rows.setdefault(report.nodeid, _row(report.nodeid))
        row["seconds"] += report.duration
        if report.outcome != "passed" or (report.when == "call" and row["outcome"] == "passed"):
            broken = report.outcome == "failed" and report.when != "call"
            row["outcome"] = "error" if broken else report.outcome
            row["message"] = _message(report)


def _row(node: str) -> TestRow:
    test, _, case = node.rpartition("::")[2].partition("[")
    return {"test": test, "case": case.removesuffix("]"), "outcome": "passed", "message": "", "seconds": 0.0}


def _message(report: Any) -> str:  # noqa: ANN401 - pytest's report
    said = report.longrepr
    text = said[2].removeprefix("Skipped: ") if isinstance(said, tuple) else str(said or "")
    half = MESSAGE_CHARACTERS // 2  # a report starts with what failed, a traceback ends with it
    return text if len(text) <= MESSAGE_CHARACTERS else f"{text[:half]}\n...\n{text[-half:]}"
