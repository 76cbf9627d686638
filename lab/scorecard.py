"""How many planted bugs a suite of tests finds: mutants of every reference, each put before the suite.

A mutant takes the reference's place in a copy of the dataset, and in a test file that holds a copy of it: suites
are compared by what they check, not by what they load. It counts if it gives other bits than the reference
somewhere (`mutate`); it is killed if a test that passes on the reference does not pass any more. A test that
returns False passed in every pytest before 8.4: such mutants are counted apart, as `denied`. Each run of tests is
a fork of one process that has torch and pytest imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from mutants import Mutant, mutants
from mutate import Trial, cut, parsed
from traceproof.audit import Function, TestFile
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import DatasetTree, read_tree
from traceproof.lazy import StandIns
from traceproof.ops import registry
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import GIB, Limits
from traceproof.testgen.generate import Divergences, GenerateOptions, generate

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


COUNTED = frozenset({"killed", "survived"})
LIMITS = Limits(seconds=SECONDS, setup_seconds=SECONDS, memory_bytes=16 * GIB)  # of a call of a mutant


@dataclass(slots=True)
class Card:
    """One definition's score."""

    definition: str
    op_type: str
    tests: int = 0  # tests that pass on the reference; 0 kills nothing
    total: int = 0  # mutants that give other bits; `equivalent` ones do not
    killed: int = 0  # mutants of `total` that the suite refuses
    denied: int = 0  # mutants that it would refuse, too, if a returned False were a failure
    equivalent: int = 0
    survivors: list[dict[str, Any]] = field(
        default_factory=list
    )  # kind, line and change of each mutant not killed
    alarms: list[int] = field(default_factory=list)  # seeds on which a test fails on the unchanged reference
    seeds: int = 0  # how many were tried


def score(suite: Suite, entry: Path, definition: Definition, *, seeds: int, most: int | None = None) -> Card:
    """Put mutants of a definition before a suite, all or `most`, evenly spread; equivalent ones drop out.

    Args:
        suite: what is scored.
        entry: the definition's file in the suite's copy of the dataset.
        definition: what it holds.
        seeds: how many, for false alarms; seed 0 is the one that mutants run with.
        most: mutants to take; None: all.
    """
    suite.plant(entry, None)
    right = suite.run(definition)
    card = Card(definition.name, definition.op_type, sum(how in GOOD for how in right.values()), seeds=seeds)
    card.alarms = [seed for seed in range(1, seeds) if _worse(right, suite.run(definition, seed))]
    with untrusted_pool() as pool:
        trial = Trial(definition, pool, sizes=("small", "medium"), seed=0, limits=LIMITS)
        for mutant in _spread(list(mutants(definition.reference)), most):
            fate = trial.run(mutant)["fate"]
            card.equivalent += fate == "equivalent"
            if fate not in COUNTED:
                continue
            card.total += 1
            suite.plant(entry, mutant.source)
            found = suite.run(definition, right=right)
            if _worse(right, found):
                card.killed += 1
                continue
            card.denied += any(right.get(test) == PASSED and how == DENIED for test, how in found.items())
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


def table(cards: Sequence[Card]) -> str:
    """Kill rates by op_type."""
    rows: dict[str, list[Card]] = {}
    for card in cards:
        rows.setdefault(card.op_type, []).append(card)
    heads = f"{'op_type':12} {'definitions':>11} {'mutants':>8} {'killed':>7} {'rate':>7} {'denied':>7}"
    lines = [f"{heads} {'alarms':>7} {'seeds':>6}"]
    for op_type, found in sorted(rows.items()):
        total, killed = sum(card.total for card in found), sum(card.killed for card in found)
        rate = f"{killed / total:7.1%}" if total else f"{'-':>7}"
        denied, alarms = sum(card.denied for card in found), sum(len(card.alarms) for card in found)
        seeds = min(card.seeds for card in found)
        lines.append(f"{op_type:12} {len(found):11} {total:7} {killed:7} {rate} {denied:7} {alarms:7} {seeds:6}")
    return "\n".join(lines) + "\n"


PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--suite", type=Path, help="a folder of tests; ours, generated anew, if left out")
PARSER.add_argument("--definition-name", nargs="*", help="default: all")
PARSER.add_argument("--seeds", type=int, default=32, help="for false alarms, our suite only")
PARSER.add_argument("--most", type=int, help="mutants of a definition, evenly spread; 0: none; default: all")
PARSER.add_argument("--cut", nargs="*", default=[], metavar="AXIS=SIZE", help="run with other const axes")
PARSER.add_argument("--device", default="cpu", help="where our suite runs")
PARSER.add_argument("--jobs", type=int, default=1, help="definitions at once, a thread each; cheap ones first")
PARSER.add_argument("--preload", nargs="*", default=[], help="packages to import before each test's fork")
PARSER.add_argument("--out", type=Path, required=True, help="JSON")


def main() -> int:
    """Prints the table; what every definition got and the survivors are in --out."""
    options = PARSER.parse_args()
    tree = read_tree(options.dataset)
    names = sorted(options.definition_name or tree.definitions, key=lambda name: _cost(tree, name))
    cards: list[Card] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(one, name, options) for name in names]):
            card = done.result()
            cards.append(card)
            said = f"{card.killed} of {card.total} killed by {card.tests} tests; {len(card.alarms)} alarms"
            sys.stderr.write(f"{card.definition}: {said} in {card.seeds} seeds\n")
            rows = sorted(map(asdict, cards), key=lambda row: str(row["definition"]))
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(cards))
    return 0


def _cost(tree: DatasetTree, name: str) -> int:
    """Bytes that all cases of a definition go through: what its tests take grows with them."""
    definition = tree.definitions[name].definition
    op, _ = registry.for_definition(definition)
    cases = op.cases(definition, sizes=("small", "medium"), seed=0)
    return sum(op.memory(definition, case) * max(1, op.trials(definition, case)) for case in cases)


def one(name: str, options: Any) -> Card:  # noqa: ANN401 - parsed options
    """Score one definition in a copy of the dataset that holds it alone."""
    torch.set_num_threads(1)
    for package in options.preload:
        importlib.import_module(package)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's own
        raise RuntimeError(f"--preload {' '.join(options.preload)} starts CUDA, which does not survive a fork")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "dataset"
        _copy(read_tree(options.dataset), name, root, parsed(options.cut))
        if options.suite is None:
            generate(GenerateOptions(root=root, everything=True), Divergences())
            suite = Suite(root, generated, ("--seed={seed}", f"--device={options.device}"))
        else:
            shutil.copytree(options.suite, root / "tests" / "references")
            suite = Suite(root, partial(existing, root=root))
        entry = read_tree(root).definitions[name]
        seeds = options.seeds if options.suite is None else 1
        return score(suite, entry.path, entry.definition, seeds=seeds, most=options.most)


def _copy(tree: DatasetTree, name: str, root: Path, sizes: dict[str, int]) -> None:
    """The definition's file, with other sizes of const axes where it has them."""
    entry = tree.definitions[name]
    path = root / entry.path
    path.parent.mkdir(parents=True)
    if not sizes:
        shutil.copyfile(tree.root / entry.path, path)
        return
    path.write_text(json.dumps(cut(entry.definition, sizes).as_json()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
