"""Lint a dataset; tell what is found, beside a baseline of known findings, as text and JSON."""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.dataset.tree import paused_collection, read_tree
from traceproof.errors import TraceproofError
from traceproof.lint import definitions, model, workloads
from traceproof.lint.model import Code, Finding, Hit, LintedDataset, Severity

NEEDS_FLASHINFER = "TP422"  # the rule that needs an unpacked FlashInfer
DEEPEST = 50_000  # Python frames; a walk needs about five a level, the parser takes about 3,000 levels


@dataclass(frozen=True, slots=True)
class LintReport:
    """What the rules found."""

    findings: tuple[Finding, ...]  # what no baseline knows, by path and code
    known: tuple[Finding, ...]  # what the baseline knows
    gone: int  # how many findings of the baseline are no longer found
    not_run: tuple[str, ...]  # a line for each rule that could not run, saying why
    definitions: int  # how many definitions were looked at

    @property
    def failed(self) -> bool:
        """Whether there is a new finding that is more than a note."""
        return any(finding.about.severity is not Severity.NOTE for finding in self.findings)


def chosen(select: Collection[str], ignore: Collection[str]) -> Mapping[str, Code]:
    """The codes that start with one of `select` (empty: all) and with none of `ignore`.

    Raises TraceproofError: an argument that is the beginning of no code.
    """
    known = model.codes("TP")
    wrong = [code for code in (*select, *ignore) if not any(one.startswith(code) and code for one in known)]
    if wrong:
        problems = [f"{code!r} is the beginning of no code" for code in wrong]
        raise TraceproofError("The rules can not be chosen", problems=problems, todo=f"Codes: {', '.join(known)}.")
    wanted, unwanted = tuple(select) or "TP", tuple(ignore)
    return {code: one for code, one in known.items() if code.startswith(wanted) and not code.startswith(unwanted)}


def hits(dataset: LintedDataset) -> Iterator[Hit]:
    """What all checks find."""
    for check in (*definitions.OF_DATASET, *workloads.OF_DATASET):
        yield from check(dataset)
    for subject in dataset.subjects:
        for of_one in definitions.OF_DEFINITION:
            yield from (hit._replace(path=subject.path) for hit in of_one(subject))


def lint(
    root: Path,  # a dataset folder
    *,
    select: Collection[str] = (),  # codes, or beginnings of codes, to run; empty for all
    ignore: Collection[str] = (),  # codes, or beginnings of codes, not to run
    baseline: Path | None = None,  # a file with known findings
    flashinfer: Path | None = None,  # where an unpacked FlashInfer lies; rules that need it say so without it
) -> LintReport:
    """Hold the dataset at `root` against the chosen rules.

    Raises TraceproofError: no dataset, no baseline or no FlashInfer where one was said to be; unknown codes.
    """
    rules = chosen(select, ignore)
    known = model.read_baseline(baseline) if baseline is not None else Counter[str]()
    dataset = LintedDataset(read_tree(root), flashinfer)
    not_run: tuple[str, ...] = ()
    if flashinfer is None and (one := rules.get(NEEDS_FLASHINFER)) is not None:
        not_run = (f"{one.code} ({one.title}) did not run: it needs --flashinfer-path",)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEPEST))
    try:
        with paused_collection():
            every = (Finding(hit.path, hit.line, 0, hit.code, hit.field, hit.evidence) for hit in hits(dataset))
            found = sorted(finding for finding in every if finding.code in rules)
    finally:
        sys.setrecursionlimit(before)
    new, old, gone = model.split(found, known) if known else (found, [], 0)
    return LintReport(tuple(new), tuple(old), gone, not_run, len(dataset.tree.definitions))


def as_json(report: LintReport) -> dict[str, Any]:
    """The report as a JSON object; a finding has the fields of `Finding.as_json`."""
    return {
        "definitions": report.definitions,
        "findings": [finding.as_json() for finding in report.findings],
        "known": [finding.as_json() for finding in report.known],
        "gone": report.gone,
        "not_run": list(report.not_run),
        "failed": report.failed,
    }


def report_text(report: LintReport) -> str:
    """New findings with a table of their codes, rules that did not run, and one closing line."""

    def count(number: int, what: str) -> str:
        return f"{number} {what}{'' if number == 1 else 's'}"

    counts = Counter(finding.about.severity for finding in report.findings)
    parts = [count(counts[severity], severity.value) for severity in Severity]
    text = f"{count(report.definitions, 'definition')}: {', '.join(parts)}"
    if report.known or report.gone:
        text += f"; {len(report.known)} known by the baseline, {report.gone} of it gone"
    return model.as_text(report.findings) + "".join(f"{line}\n" for line in (*report.not_run, text))
