"""The audit of a folder of tests: reading every file, and running each in an isolated worker, in bounded time."""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.audit.reading import Finding, TestFile, check, check_api, check_subject
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.files import MIB, read_bytes
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.model import Code, codes
from traceproof.sandbox import GIB, Limits, Pool, Status

SECONDS = 180.0  # for one file, if nothing else is said; a reference over gigabytes of weights takes most of it
LARGEST = 16 * MIB  # of a test file
CODES: Mapping[str, Code] = codes("TA")
SETUP = "traceproof.audit.trial:setup"
RECORD = "record.jsonl"  # in the scratch folder
RECORD_BYTES = 64 * MIB
OUTPUT_BYTES = 64 * MIB  # of what the tests print
MEMORY_BYTES = 16 * GIB
PROCESSES = 64
STDERR_CHARACTERS = 300


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


@dataclass(slots=True)
class Trial:
    """What running a file showed; what it got to until its time was up counts."""

    wrong: list[dict[str, Any]] = field(default_factory=list)  # a row per wrong answer that was tried
    not_tried: str = ""  # why none could be tried; empty if some were
    collected: int | None = None  # how many tests pytest collected; None: it did not get to that
    problems: list[str] = field(default_factory=list)  # why pytest could not collect the file
    rows: list[dict[str, Any]] = field(default_factory=list)  # a row per test that ended
    running: str = ""  # the test that ran when the time was up; empty if none did
    timed_out: bool = False  # whether the time was up
    crashed: str = ""  # how the process ended, unless as it should

    def take(self, line: Mapping[str, Any]) -> None:
        """One line of the trial's record."""
        match line:
            case {"wrong": list(rows)}:
                self.wrong += rows
            case {"not_tried": str(why)}:
                self.not_tried = why
            case {"collected": int(count)}:
                self.collected = count
            case {"problem": str(text)}:
                self.problems.append(text)
            case {"begun": str(test)}:
                self.running = test
            case {"test": str(_)}:
                self.rows.append(dict(line))
                self.running = ""


def audit(folder: Path, settings: Settings) -> Report:
    """Audit every test_*.py below a folder. Raises TraceproofError: no tests, dataset, or FlashInfer."""
    paths = sorted(folder.rglob("test_*.py"))
    if not paths:
        raise TraceproofError(f"{folder} holds no test_*.py", todo="Give the folder of the tests.")
    tree = read_tree(settings.dataset)
    definitions = {name: entry.definition for name, entry in tree.definitions.items()}
    package = Package(settings.flashinfer) if settings.flashinfer is not None else None
    report = Report(files=len(paths))
    with contextlib.ExitStack() as stack:
        workers = None
        if settings.python is not None:
            workers = stack.enter_context(pool(settings.python, folder.resolve(), tree.root))
        for number, path in enumerate(paths, start=1):
            relative = path.relative_to(folder)
            try:
                file = TestFile(relative, read_bytes(path, most=LARGEST).decode())
            except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
                report.findings.append(Finding(relative, 1, 1, 1, 1, "TA000", str(error)))
                continue
            report.tests += len(file.tests)
            report.findings += [*check(file), *check_subject(file, definitions), *_empty(file, report)]
            if package is not None:
                report.findings += check_api(file, package)
            if workers is not None:
                order = _order(path, file, tree.root, definitions)
                label = f"{number}/{len(paths)}  {relative}"
                settings.say(f"{label}  running, at most {settings.seconds:g} s")
                started = time.monotonic()
                trial = run(order, workers, seconds=settings.seconds)
                ended = f"{len(trial.rows)} of {trial.collected or 0} tests in {time.monotonic() - started:.0f} s"
                settings.say(f"{label}  {'timed out: ' if trial.timed_out else ''}{ended}")
                report.findings += _shown(file, trial, report, settings.seconds, ended)
    report.findings = sorted(set(report.findings))
    return report


def _empty(file: TestFile, report: Report) -> Iterator[Finding]:
    """A file without tests of its own: classes may inherit some, which reading does not follow."""
    if file.bases and not file.tests:
        report.inherited[file.path.as_posix()] = ", ".join(file.bases)
    elif not file.tests:
        yield file.finding(file.tree, "TA108", "no function is named test_*, and no class inherits any")


def _order(path: Path, file: TestFile, root: Path, definitions: Mapping[str, Definition]) -> dict[str, Any]:
    """What the worker is told of a file."""
    names = [name for name, _ in file.loaded] or [file.subject(definitions) or ""]
    return {
        "path": str(path.resolve()),
        "dataset": str(root),
        "reference": next((definitions[name].reference for name in names if name in definitions), None),
        "tests": [test.name for test in file.tests],
    }


def _shown(file: TestFile, trial: Trial, report: Report, seconds: float, ended: str) -> Iterator[Finding]:
    """What running a file showed; why it could not be run, or not whole, goes into the report."""
    report.collected = (report.collected or 0) + (trial.collected or 0)
    untried = f"no wrong answer was tried: {trial.not_tried}" if trial.not_tried and file.tests else ""
    problems = [problem for problem in (trial.crashed, *trial.problems, untried) if problem]
    if problems:
        report.not_run[file.path.as_posix()] = "; ".join(problems)
    for row in trial.wrong:
        if row["passes"]:
            share = f"{row['within']:.1%} of {row['output']} within atol {row['atol']:g}, rtol {row['rtol']:g}"
            what = f"{row['wrong']} pass: {share}, {row['needed']:.0%} needed"
            yield file.finding(file.functions[row["test"]], "TA301", what)
    for row in trial.rows:
        test = file.functions.get(row["test"].partition("[")[0])
        if test is not None and row["outcome"] == "passed" and not row["comparisons"]:
            yield file.finding(test, "TA107", f"{test.name} passed without a GPU, after 0 comparisons")
    if trial.timed_out:
        where = f"in {trial.running}" if trial.running else "before the first test"
        yield file.finding(file.tree, "TA109", f"after {seconds:g} s {where}; {ended}")


def pool(python: str, *readable: Path) -> Pool:
    """Isolated workers that may read the tests and the dataset: test files and references are untrusted code."""
    source = str(Path(__file__).resolve().parents[2])
    return Pool(preload=("torch",), python=python, env={"PYTHONPATH": source}, readable=readable)


def run(order: Mapping[str, Any], workers: Pool, *, seconds: float) -> Trial:
    """Run `traceproof.audit.trial` on a file; everything that it started has ended when this returns."""
    trial = Trial()
    limits = Limits(seconds=seconds, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES, processes=PROCESSES)
    with tempfile.TemporaryDirectory(prefix="traceproof-audit-", ignore_cleanup_errors=True) as scratch:
        with workers.session(setup=SETUP, payload=RECORD, limits=limits, scratch=Path(scratch)) as session:
            ended = session.ask(order)
        for line in _record(Path(scratch) / RECORD):
            trial.take(line)
    trial.timed_out = ended.status is Status.TIMEOUT
    if ended.status not in {Status.OK, Status.TIMEOUT}:
        trial.crashed = f"ended with {ended.status}: {ended.message.strip()[-STDERR_CHARACTERS:]}"
    return trial


def _record(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines that the worker wrote, as far as they are some: untrusted code may have written there."""
    try:
        text = read_bytes(path, most=RECORD_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # the last line of a process that was ended
            value = json.loads(line)
            if isinstance(value, dict):
                yield value
