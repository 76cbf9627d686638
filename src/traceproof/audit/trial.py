"""Runs one test file where it can do no harm: which tests pass, and whether they compared anything.

It runs in an environment with torch and pytest. Packages that the file imports and that are absent get stand-ins,
whose functions raise when they are called: what a test does before it needs a kernel is run.
"""

import ast
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from traceproof.lazy import StandIns


class ComparisonCounter:
    """A pytest plugin that counts tests, and the comparisons that each makes."""

    def __init__(self) -> None:
        self.collected = 0
        self.problem = ""  # why the file could not be collected
        self.passed_without: list[str] = []  # tests that passed without a comparison
        self._count = 0
        for owner, name in (
            (torch, "allclose"),
            (torch, "isclose"),
            (torch, "equal"),
            (torch.testing, "assert_close"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as the function wrapped
            self._count += 1
            return function(*arguments, **options)

        return counting

    def pytest_collection_finish(self, session: Any) -> None:  # noqa: ANN401 - pytest's session
        """How many tests there are."""
        self.collected = len(session.items)

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's report
        """A file that can not be collected."""
        if report.failed:
            self.problem = str(report.longrepr).strip().splitlines()[-1][-200:]

    def pytest_runtest_setup(self) -> None:
        """Start counting."""
        self._count = 0

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's report
        """Note a test that passed and compared nothing."""
        if report.when == "call" and report.outcome == "passed" and not self._count:
            self.passed_without.append(report.nodeid.rpartition("::")[2])


class AbsentError(RuntimeError):
    """A function of a package that is not installed was called."""


def _raising(place: str) -> Callable[..., None]:
    def absent(*_: object, **__: object) -> None:
        raise AbsentError(f"{place} was called, and its package is not installed")

    return absent


def stand_in(source: str) -> tuple[str, ...]:
    """Let every absent package that the source imports be imported; gives their names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    absent = frozenset(name for name in names if importlib.util.find_spec(name) is None)
    StandIns(absent, _raising).install()
    return tuple(sorted(absent))


def setup(_payload: None, _scratch: Path) -> Callable[[str], dict[str, Any]]:
    """In the worker: the result runs the tests of a file."""
    import pytest

    def run(name: str) -> dict[str, Any]:
        path = Path(name)
        os.chdir(path.parent)
        sys.path.insert(0, str(path.parent))  # as `python FILE` has it
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what a machine without a GPU sees is the question
        stand_in(path.read_text(encoding="utf-8"))
        watch = ComparisonCounter()
        arguments = [name, "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
            code = pytest.main(arguments, plugins=[watch])
        problem = watch.problem
        if code in {pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR}:  # no test was even looked for
            lines = said.getvalue().strip().splitlines() or ["pytest did not say why"]
            problem = f"pytest ended with {code}: {lines[-1][-200:]}"
        return {"collected": watch.collected, "problem": problem, "passed_without": watch.passed_without}

    return run
