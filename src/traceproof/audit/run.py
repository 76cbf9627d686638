"""The whole audit of a folder of tests: reading every file, and running each in a process of its own."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.audit import copies, process, static
from traceproof.audit.findings import Finding, at
from traceproof.audit.source import Function, TestFile
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.model import Code, codes
from traceproof.reading import MIB, read_bytes
from traceproof.sandbox import Pool

SECONDS = 180.0  # for one file, if nothing else is said; a reference over gigabytes of weights takes most of it
LARGEST = 16 * MIB  # of a test file
CODES: Mapping[str, Code] = codes("TA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a folder is audited."""

    dataset: Path  # the definitions that the tests are of
    flashinfer: Path | None = None  # an unpacked FlashInfer; None: APIs are not checked
    python: str | None = None  # an interpreter with torch and pytest; None: nothing is run
    seconds: float = SECONDS  # of one file
    # takes a line whenever a file begins or ends to run
    say: Callable[[str], None] = field(default=lambda _: None)


@dataclass(slots=True)
class Report:
    """What an audit found."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    tests: int = 0  # how many tests stand in the files
    # how many pytest found, inherited and parametrised ones too; None where no file was run
    collected: int | None = None
    not_run: dict[str, str] = field(default_factory=dict)  # why a trial of a file could not be made
    # files without tests of their own, and what their classes inherit from
    inherited: dict[str, str] = field(default_factory=dict)


def audit(folder: Path, settings: Settings) -> Report:
    """Audit every test_*.py below a folder. Raises TraceproofError: no tests, dataset, or FlashInfer."""
    paths = sorted(folder.rglob("test_*.py"))
    if not paths:
        raise TraceproofError(f"{folder} holds no test_*.py", todo="Give the folder of the tests.")
    tree = read_tree(settings.dataset)
    definitions = {name: entry.definition for name, entry in tree.definitions.items()}
    package = Package(settings.flashinfer) if settings.flashinfer is not None else None
    report = Report(files=len(paths))
    with ExitStack() as stack:
        workers = None
        if settings.python is not None:
            workers = stack.enter_context(process.pool(settings.python, [folder.resolve(), tree.root]))
        for number, path in enumerate(paths, start=1):
            relative = path.relative_to(folder)
            try:
                file = TestFile(relative, read_bytes(path, most=LARGEST).decode())
            except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
                report.findings.append(Finding(relative, 1, 1, 1, 1, "TA000", str(error)))
                continue
            report.tests += len(file.tests)
            report.findings += [*static.check(file), *copies.check(file, definitions), *_empty(file, report)]
            if package is not None:
                report.findings += copies.check_api(file, package)
            if workers is not None:
                order = _order(path, file, tree.root, definitions)
                trial = _Trial(order, workers, settings, f"{number}/{len(paths)}  {relative}")
                report.findings += _run(trial, file, report)
    report.findings = sorted(set(report.findings))
    return report


@dataclass(frozen=True, slots=True)
class _Trial:
    """What one file is run with: the worker's order, where workers come from, and how progress calls it."""

    order: Mapping[str, Any]
    workers: Pool
    settings: Settings
    label: str


def _empty(file: TestFile, report: Report) -> Iterator[Finding]:
    """A file without tests of its own: classes may inherit some, which reading does not follow."""
    if file.tests:
        return
    bases = file.bases
    if bases:
        report.inherited[file.path.as_posix()] = ", ".join(bases)
    else:
        yield at(
            file.path, file.tree, "TA108", "no function is named test_*, and no class inherits any", file.lines
        )


def _run(trial: _Trial, file: TestFile, report: Report) -> Iterator[Finding]:
    settings, label = trial.settings, trial.label
    settings.say(f"{label}  running, at most {settings.seconds:g} s")
    started = time.monotonic()
    outcome = process.run(trial.order, trial.workers, seconds=settings.seconds)
    collected = outcome.collected or 0
    report.collected = (report.collected or 0) + collected
    ended = f"{len(outcome.rows)} of {collected} tests in {time.monotonic() - started:.0f} s"
    settings.say(f"{label}  {'timed out: ' if outcome.timed_out else ''}{ended}")
    untried = f"no wrong answer was tried: {outcome.not_tried}" if outcome.not_tried and file.tests else ""
    problems = [problem for problem in (outcome.crashed, *outcome.problems, untried) if problem]
    if problems:
        report.not_run[file.path.as_posix()] = "; ".join(problems)
    yield from _lax(file, outcome.wrong)
    yield from _uncompared(file, outcome.rows)
    if outcome.timed_out:
        where = f"in {outcome.running}" if outcome.running else "before the first test"
        yield at(file.path, file.tree, "TA109", f"after {settings.seconds:g} s {where}; {ended}", file.lines)


def _uncompared(file: TestFile, rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        test = file.functions.get(row["test"].partition("[")[0])
        if test is not None and row["outcome"] == "passed" and not row["comparisons"]:
            yield at(
                file.path, test, "TA107", f"{test.name} passed without a GPU, after 0 comparisons", file.lines
            )


def _lax(file: TestFile, rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """One finding per test and wrong answer, where every output lets it pass or one does."""
    for row in rows:
        if row["passes"]:
            test: Function = file.functions[row["test"]]
            share = f"{row['within']:.1%} of {row['output']} within atol {row['atol']:g}, rtol {row['rtol']:g}"
            what = f"{row['wrong']} pass: {share}, {row['needed']:.0%} needed"
            yield at(file.path, test, "TA301", what, file.lines)


def _order(path: Path, file: TestFile, root: Path, definitions: Mapping[str, Definition]) -> dict[str, Any]:
    """What the trial is told of a file."""
    names = [name for name, _ in copies.loaded(file)] or [copies.subject(file, definitions) or ""]
    reference = next((definitions[name].reference for name in names if name in definitions), None)
    tests = [test.name for test in file.tests]
    return {"path": str(path.resolve()), "dataset": str(root), "reference": reference, "tests": tests}
