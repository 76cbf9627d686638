"""The audit of a folder of tests: reading every file, and running each in an isolated worker, in bounded time."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from traceproof.audit.reading import TestFile, check, check_subject
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.files import MIB, read_bytes
from traceproof.lint.model import Finding
from traceproof.sandbox import GIB, Limits, Pool, Status

SECONDS = 180.0  # for one file, if nothing else is said; a reference over gigabytes of weights takes most of it
LARGEST = 16 * MIB  # of a test file
SETUP = "traceproof.audit.trial:setup"
STDERR_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """How a folder is audited."""

    dataset: Path  # the definitions that the tests are of
    python: str | None = None  # an interpreter with torch and pytest; None: nothing is run
    seconds: float = SECONDS  # of one file
    say: Callable[[str], None] = field(default=lambda _: None)  # takes a line whenever a file begins to run


@dataclass(slots=True)
class AuditReport:
    """What an audit found."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    tests: int = 0  # how many tests stand in the files
    # how many pytest found, inherited and parametrised ones too; None where no file was run
    collected: int | None = None
    not_run: dict[str, str] = field(default_factory=dict)  # why a file could not be run, or not whole


def audit(folder: Path, settings: AuditSettings) -> AuditReport:
    """Audit every test_*.py below a folder. Raises TraceproofError: no tests, or no dataset."""
    paths = sorted(folder.rglob("test_*.py"))
    if not paths:
        raise TraceproofError(f"{folder} holds no test_*.py", todo="Give the folder of the tests.")
    tree = read_tree(settings.dataset)
    definitions = {name: entry.definition for name, entry in tree.definitions.items()}
    report = AuditReport(files=len(paths))
    with contextlib.ExitStack() as stack:
        workers = None
        if settings.python is not None:
            workers = stack.enter_context(pool(settings.python, folder.resolve(), tree.root))
        for number, path in enumerate(paths, start=1):
            relative = path.relative_to(folder)
            try:
                file = TestFile(relative, read_bytes(path, most=LARGEST).decode())
            except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
                report.findings.append(Finding(relative, 1, 1, "TA000", "", str(error)))
                continue
            report.tests += len(file.tests)
            report.findings += [*check(file), *check_subject(file, definitions)]
            if workers is not None:
                settings.say(f"{number}/{len(paths)}  {relative}  running, at most {settings.seconds:g} s")
                report.findings += _run(path, file, workers, settings.seconds, report)
    report.findings = sorted(set(report.findings))
    return report


def pool(python: str, *readable: Path) -> Pool:
    """Isolated workers that may read the tests and the dataset: test files are untrusted code."""
    source = str(Path(__file__).resolve().parents[2])
    return Pool(preload=("torch",), python=python, env={"PYTHONPATH": source}, readable=readable)


def _run(path: Path, file: TestFile, workers: Pool, seconds: float, report: AuditReport) -> Iterator[Finding]:
    """What running a file shows; why it could not be run goes into the report."""
    limits = Limits(seconds=seconds, memory_bytes=16 * GIB, output_bytes=64 * MIB, processes=64)
    with (
        tempfile.TemporaryDirectory(prefix="traceproof-audit-", ignore_cleanup_errors=True) as scratch,
        workers.session(setup=SETUP, payload=None, limits=limits, scratch=Path(scratch)) as session,
    ):
        ended = session.ask(str(path.resolve()))
    report.collected = report.collected or 0
    if ended.status is Status.TIMEOUT:
        yield file.finding(file.tree, "TA109", f"not done after {seconds:g} s")
        return
    name = file.path.as_posix()
    match ended.value:
        case {"collected": int(collected), "problem": str(problem), "passed_without": list(passed)}:
            report.collected += collected
            if problem:
                report.not_run[name] = problem
            for test in dict.fromkeys(str(one).partition("[")[0] for one in passed):
                if test in file.functions:
                    what = f"{test} passed without a GPU, after 0 comparisons"
                    yield file.finding(file.functions[test], "TA107", what)
        case _:
            report.not_run[name] = f"ended with {ended.status}: {ended.message.strip()[-STDERR_CHARACTERS:]}"
