"""The whole audit of a folder of tests: reading every file, and running each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.audit import copies, static
from traceproof.audit.findings import Code, Finding, at
from traceproof.audit.source import Function, TestFile
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.lint.flashinfer_names import Package

SECONDS = 180.0  # for one file; a reference over a few gigabytes of weights takes most of it
CODES: Mapping[str, Code] = {
    code.code: code
    for code in (
        Code("TA000", "is no Python", "mend or remove the file"),
        Code("TA101", "asserts nothing about an output", "assert on every output"),
        Code("TA102", "returns its result instead of asserting it", "pytest looks at no return value: assert"),
        Code("TA103", "swallows every exception", "catch what is expected, or nothing"),
        Code("TA104", "as a script, succeeds whatever happens", "end with sys.exit(1) on a failure"),
        Code("TA105", "returns silently without a GPU, and counts as passed", "pytest.skip with the reason"),
        Code("TA106", "asserts shapes and NaN only", "compare with an oracle or a ground truth"),
        Code("TA107", "passes without having compared anything (seen by running it)", "compare, or skip"),
        Code("TA201", "tests a pasted copy of the reference", "load the definition's own reference"),
        Code(
            "TA202", "tests a pasted copy that differs from the reference", "load the definition's own reference"
        ),
        Code("TA203", "loads a definition that does not exist", "name one of the dataset's definitions"),
        Code("TA204", "tests code that belongs to no definition", "add the definition, or remove the test"),
        Code("TA301", "has a tolerance under which a wrong answer passes (seen by running it)", "tighten it"),
        Code("TA302", "draws without a seed", "torch.manual_seed before drawing"),
        Code("TA303", "uses identity page tables only", "permute the pages"),
        Code("TA401", "calls an API that does not exist", "call what that version has"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a folder is audited.

    Attributes:
        dataset: the definitions that the tests are of.
        flashinfer: an unpacked FlashInfer; None: APIs are not checked.
        python: an interpreter with torch and pytest; None: nothing is run.
    """

    dataset: Path
    flashinfer: Path | None = None
    python: str | None = None


@dataclass(slots=True)
class Report:
    """What an audit found; `not_run` says why a trial of a file could not be made."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    tests: int = 0
    not_run: dict[str, str] = field(default_factory=dict)


def audit(folder: Path, settings: Settings) -> Report:
    """Audit every test_*.py below a folder.

    Raises:
        TraceproofError: there is none, the dataset is none, or the FlashInfer is none.
    """
    paths = sorted(folder.rglob("test_*.py"))
    if not paths:
        raise TraceproofError(f"{folder} holds no test_*.py", todo="Give the folder of the tests.")
    tree = read_tree(settings.dataset)
    definitions = {name: entry.definition for name, entry in tree.definitions.items()}
    package = Package(settings.flashinfer) if settings.flashinfer is not None else None
    report = Report(files=len(paths))
    for path in paths:
        relative = path.relative_to(folder)
        try:
            file = TestFile(relative, path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError) as error:
            report.findings.append(Finding(relative, 1, 1, 1, 1, "TA000", str(error)))
            continue
        report.tests += len(file.tests)
        report.findings += [*static.check(file), *copies.check(file, definitions)]
        if package is not None:
            report.findings += copies.check_api(file, package)
        if settings.python is not None:
            report.findings += _run(path, file, definitions, settings.python, report)
    report.findings = sorted(set(report.findings))
    return report


def _run(
    path: Path, file: TestFile, definitions: Mapping[str, Definition], python: str, report: Report
) -> Iterator[Finding]:
    outcome = _trial(path, file, definitions, python)
    if "not_run" in outcome:
        report.not_run[file.path.as_posix()] = outcome["not_run"]
    yield from _lax(file, outcome.get("wrong", ()))
    for row in outcome.get("pytest", ()):
        test = file.functions.get(row["test"].partition("[")[0])
        if test is not None and row["outcome"] == "passed" and not row["comparisons"]:
            yield at(
                file.path, test, "TA107", f"{test.name} passed without a GPU, after 0 comparisons", file.lines
            )


def _lax(file: TestFile, rows: Any) -> Iterator[Finding]:  # noqa: ANN401 - JSON
    """One finding a test and wrong answer, where every output lets it pass or one does."""
    for row in rows:
        if row["passes"]:
            test: Function = file.functions[row["test"]]
            share = f"{row['within']:.1%} of {row['output']} within atol {row['atol']:g}, rtol {row['rtol']:g}"
            what = f"{row['wrong']} pass: {share}, {row['needed']:.0%} needed"
            yield at(file.path, test, "TA301", what, file.lines)


def _trial(path: Path, file: TestFile, definitions: Mapping[str, Definition], python: str) -> dict[str, Any]:
    names = [name for name, _ in copies.loaded(file)] or [copies.subject(file, definitions) or ""]
    reference = next((definitions[name].reference for name in names if name in definitions), None)
    order = {"path": str(path.resolve()), "reference": reference, "tests": [test.name for test in file.tests]}
    source = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "traceproof.audit.trial", json.dumps(order)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=path.parent
        )
    except subprocess.TimeoutExpired:
        return {"not_run": f"not done after {SECONDS:g} s"}
    if done.returncode:
        return {"not_run": f"ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
    value: dict[str, Any] = json.loads(done.stdout)
    return value
