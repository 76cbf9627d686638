"""Running a suite of tests over one definition, with its own reference or with another in its place.

Each run is a fork of one process that has torch and pytest imported. A reference is replaced in a copy of the
dataset, and in a test file that holds a copy of it, there as well: suites are compared by what they check, not by
what they load.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.audit import Function, TestFile
from traceproof.dataset.definition import Definition
from traceproof.lazy import StandIns

SECONDS = 120  # of one run of one definition's tests; the child is ended by an alarm
CRASHED = "the run"  # stands in the place of a test where there is no outcome of any
PASSED = "passed"
DENIED = "denied"  # passed, and returned False
GOOD = frozenset({PASSED, DENIED})


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


@dataclass(frozen=True, slots=True)
class Suite:
    """A copy of a dataset with its tests, whose references can be replaced.

    Attributes:
        root: the copy.
        select: arguments that make pytest run one definition's tests.
        options: further arguments of pytest, by which a suite takes a seed; `{seed}` is replaced.
    """

    root: Path
    select: Callable[[Definition], Sequence[str]]
    options: tuple[str, ...] = ()

    def run(
        self, definition: Definition, seed: int = 0, *, right: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Outcome by test, of the definition's tests; stops where a test fails that does not in `right`."""
        arguments = [*self.select(definition), *(option.format(seed=seed) for option in self.options)]
        return forked(lambda: _pytest(self.root, arguments, right or {})) or {CRASHED: "crashed"}

    def plant(self, entry: Path, source: str | None) -> None:
        """Put a reference in the place of a definition's own, in its file and in copies; None: restore all."""
        for path, text in _originals(self.root, entry):
            path.write_text(text if source is None else _replaced(path, text, source), encoding="utf-8")


def forked(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Run work in a fork of this process; empty if it raised, crashed or took too long."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(SECONDS)
        _quiet()
        try:
            value = work()
        except BaseException:  # noqa: BLE001 - whatever a mutant raises; the child must not go on
            traceback.print_exc()
            value = {}
        with os.fdopen(writer, "w") as pipe:
            json.dump(value, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    result: dict[str, str] = json.loads(text) if text else {}
    return result


def _quiet() -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def _pytest(root: Path, arguments: Sequence[str], right: Mapping[str, str]) -> dict[str, str]:
    import pytest

    watch = _Watch(right)
    os.chdir(root)
    sys.dont_write_bytecode = False  # rewritten assertions are kept for the next run
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others' plugins cost seconds a run
    pytest.main([*arguments, "-q", "-p", "no:cacheprovider"], plugins=[watch])
    return watch.outcomes


class _Watch:
    """A pytest plugin that notes outcomes, and ends a session at the first failure of what passes in `right`."""

    def __init__(self, right: Mapping[str, str]) -> None:
        self._right = right
        self._session: Any = None
        self.outcomes: dict[str, str] = {}
        self._denied: set[str] = set()

    def pytest_sessionstart(self, session: Any) -> None:  # noqa: ANN401 - pytest's session
        """Remember what can be stopped."""
        self._session = session

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:  # noqa: ANN401 - pytest's function
        """Call a test; what it returns is nobody's business, as in pytest before 8.4, but it is noted."""
        names = pyfuncitem._fixtureinfo.argnames  # noqa: SLF001 - as pytest's own hook does
        returned = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
        if returned is False:
            self._denied.add(pyfuncitem.nodeid)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's report
        """A failure in any phase counts."""
        if report.when == "call" or report.outcome != PASSED:
            denied = report.nodeid in self._denied and report.outcome == PASSED
            self.outcomes[report.nodeid] = DENIED if denied else report.outcome
        if report.outcome != PASSED and self._right.get(report.nodeid) in GOOD:
            self._session.shouldstop = "the suite has found it"


def _originals(root: Path, entry: Path) -> list[tuple[Path, str]]:
    """The files that hold a definition's reference, with their text as it was before anything was planted."""
    kept = root / ".originals"
    paths = [root / entry, *sorted((root / "tests").rglob("test_*.py"))]
    found = []
    for path in paths:
        copy = kept / path.relative_to(root)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        found.append((path, copy.read_text(encoding="utf-8")))
    stem = entry.stem
    return [(path, text) for path, text in found if path.suffix == ".json" or _is_about(path, stem)]


def _is_about(path: Path, name: str) -> bool:
    """Whether a file is named after a definition, the words that file names leave out left out."""
    rest = iter(name.split("_"))
    return all(word in rest for word in path.stem.removeprefix("test_").split("_"))


def _replaced(path: Path, text: str, source: str) -> str:
    """A definition's JSON with another reference, or a test file with another `run`."""
    if path.suffix == ".json":
        return json.dumps({**json.loads(text), "reference": source})
    file = TestFile(path, text)
    old = file.functions.get("run")
    new = next((n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "run"), None)
    if old is None or new is None or _parameters(old) != _parameters(new):
        return text  # a copy with other parameters is another function: no mutant can take its place
    start = min([old.lineno, *(decorator.lineno for decorator in old.decorator_list)])
    lines = text.splitlines()
    return "\n".join([*lines[: start - 1], ast.unparse(new), *lines[old.end_lineno :]]) + "\n"


def _parameters(function: Function) -> list[str]:
    return [argument.arg for argument in function.args.args]


def generated(definition: Definition) -> list[str]:
    """The file of our own suite."""
    return [f"tests/references/test_{definition.name}.py"]


def existing(definition: Definition, root: Path) -> list[str]:
    """The files of another suite that are named after a definition."""
    files = [path for path in sorted((root / "tests").rglob("test_*.py")) if _is_about(path, definition.name)]
    for path in files:
        stand_in(path.read_text(encoding="utf-8"))
    return [str(path.relative_to(root)) for path in files]
