"""How many planted bugs a suite of tests finds: mutants of every reference, each put before the suite.

A mutant takes the reference's place in a copy of the dataset, and in a test file that holds a copy of the
reference, there as well: suites are compared by what they check, not by what they load. Each run is a fork
of one process that has torch and pytest imported. A mutant counts if it gives other bits than the reference
somewhere (`traceproof.mutate`); it is killed if a test that passes on the reference does not pass any more. A test
that returns False passed in every pytest before 8.4: such mutants are counted apart, as `denied`.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from traceproof.audit.source import Function, TestFile
from traceproof.audit.trial import stand_in
from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.mutate.mutants import Mutant, mutants
from traceproof.mutate.trial import setup

SECONDS = 120  # of one run of one definition's tests; the child is ended by an alarm
CRASHED = "the run"  # stands in the place of a test where there is no outcome of any
COUNTED = frozenset({"killed", "survived"})
PASSED = "passed"
DENIED = "denied"  # passed, and returned False
GOOD = frozenset({PASSED, DENIED})
Known = dict[str, dict[str, str]]  # fates by digests of definition and mutant


@dataclass(slots=True)
class Card:
    """One definition's score.

    Attributes:
        total: mutants that give other bits; `equivalent` ones do not.
        killed: how many of `total` the suite refuses.
        denied: how many more it would refuse if a returned False were a failure.
        survivors: all that are not killed, each with its kind, line and change.
        tests: how many tests pass on the reference; 0 kills nothing.
        alarms: seeds on which a test fails on the unchanged reference.
    """

    definition: str
    op_type: str
    tests: int = 0
    total: int = 0
    killed: int = 0
    denied: int = 0
    equivalent: int = 0
    survivors: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[int] = field(default_factory=list)


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


def score(  # noqa: PLR0913 - each a choice of the measurement
    suite: Suite,
    entry: Path,
    definition: Definition,
    *,
    seeds: int,
    most: int | None = None,
    known: Known | None = None,
) -> Card:
    """Put mutants of a definition before a suite: all of them, or `most`, evenly spread; equivalent ones drop out.

    Args:
        suite: what is scored.
        entry: the definition's file in the suite's copy of the dataset.
        definition: what it holds.
        seeds: how many, for false alarms; seed 0 is the one that mutants run with.
        most: None takes all.
        known: fates found before; what is missing is added.
    """
    card = Card(definition.name, definition.op_type)
    suite.plant(entry, None)
    right = suite.run(definition)
    card.tests = sum(outcome in GOOD for outcome in right.values())
    for seed in range(1, seeds):
        found = suite.run(definition, seed)
        if _worse(right, found):
            card.alarms.append(seed)
    chosen = _spread(list(mutants(definition.reference)), most)
    fate = _fates(definition, chosen, known if known is not None else {})
    card.equivalent = sum(how == "equivalent" for how in fate)
    for mutant in (mutant for mutant, how in zip(chosen, fate, strict=True) if how in COUNTED):
        card.total += 1
        suite.plant(entry, mutant.source)
        found = suite.run(definition, right=right)
        if _worse(right, found):
            card.killed += 1
            continue
        card.denied += _denied(right, found)
        card.survivors.append({"operator": mutant.operator, "line": mutant.line, "what": mutant.what})
    suite.plant(entry, None)
    return card


def _spread(found: list[Mutant], most: int | None) -> list[Mutant]:
    if most is None or len(found) <= most:
        return found
    return [found[place * len(found) // most] for place in range(most)]


def _worse(right: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """Whether a test that passed does not pass now, or the whole run broke."""
    return CRASHED in found or any(right.get(test) in GOOD and how not in GOOD for test, how in found.items())


def _denied(right: Mapping[str, str], found: Mapping[str, str]) -> bool:
    return any(right.get(test) == PASSED and how == DENIED for test, how in found.items())


def _fates(definition: Definition, chosen: Sequence[Mutant], known: Known) -> list[str]:
    """By the judge: whether each mutant gives other bits. One that crashes or hangs does."""
    mine = known.setdefault(definition.digest, {})
    keys = [digest_json(mutant.source) for mutant in chosen]
    if any(key not in mine for key in keys):
        judge = setup({"definition": definition.as_json(), "sizes": ("small", "medium"), "seed": 0}, Path())
        judge({"source": definition.reference, "line": 0, "operator": ""})  # draws other seeds, for all forks
    for key, mutant in zip(keys, chosen, strict=True):
        if key not in mine:
            order = {"source": mutant.source, "line": mutant.line, "operator": mutant.operator}
            mine[key] = forked(partial(judge, order)).get("fate", "killed")
    return [mine[key] for key in keys]


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
    """The class of our own suite, without kernels that a machine without a GPU skips anyway."""
    from traceproof.testgen.files import class_names, file_name

    name = class_names([definition.name])[definition.name]
    return [f"tests/references/{file_name(definition.op_type)}::{name}"]


def existing(definition: Definition, root: Path) -> list[str]:
    """The files of another suite that are named after a definition."""
    files = [path for path in sorted((root / "tests").rglob("test_*.py")) if _is_about(path, definition.name)]
    for path in files:
        stand_in(path.read_text(encoding="utf-8"))
    return [str(path.relative_to(root)) for path in files]


def table(cards: Sequence[Card]) -> str:
    """Kill rates by op_type."""
    rows: dict[str, list[Card]] = {}
    for card in cards:
        rows.setdefault(card.op_type, []).append(card)
    lines = [
        f"{'op_type':12} {'definitions':>11} {'mutants':>8} {'killed':>7} {'rate':>7} {'denied':>7} {'alarms':>7}"
    ]
    for op_type, found in sorted(rows.items()):
        total, killed = sum(card.total for card in found), sum(card.killed for card in found)
        rate = f"{killed / total:7.1%}" if total else f"{'-':>7}"
        denied, alarms = sum(card.denied for card in found), sum(len(card.alarms) for card in found)
        lines.append(f"{op_type:12} {len(found):11} {total:7} {killed:7} {rate} {denied:7} {alarms:7}")
    return "\n".join(lines) + "\n"


def as_json(cards: Sequence[Card]) -> list[Mapping[str, Any]]:
    """The cards as JSON objects."""
    return [{name: getattr(card, name) for name in Card.__dataclass_fields__} for card in cards]
