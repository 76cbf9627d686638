"""Run the rules over a dataset."""

import importlib
import pkgutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from traceproof.dataset.files import deep_recursion, paused_collection
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.lint import rules as rules_package
from traceproof.lint.baseline import read_baseline, split
from traceproof.lint.model import RULES, Finding, Rule, Severity
from traceproof.lint.subject import Dataset

DEEPEST = 50_000  # Python frames; a walk needs about five a level, the parser takes about 3,000 levels


@dataclass(frozen=True, slots=True)
class Report:
    """What the rules found."""

    findings: tuple[Finding, ...]  # what no baseline knows, by path and code
    known: tuple[Finding, ...]  # what the baseline knows
    gone: int  # how many findings of the baseline are no longer found
    not_run: tuple[str, ...]  # a line for each rule that could not run, saying why
    definitions: int  # how many definitions were looked at

    @property
    def failed(self) -> bool:
        """Whether there is a new finding that is more than a note."""
        return any(finding.severity is not Severity.NOTE for finding in self.findings)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    for module in pkgutil.iter_modules(rules_package.__path__):
        importlib.import_module(f"{rules_package.__name__}.{module.name}")
    return tuple(RULES[code] for code in sorted(RULES))


def chosen(select: Collection[str], ignore: Collection[str]) -> tuple[Rule, ...]:
    """The rules whose code starts with one of `select` (empty: all) and with none of `ignore`.

    Raises TraceproofError: a code that is the beginning of no rule's.
    """
    known = [rule.code for rule in all_rules()]
    wrong = [code for code in (*select, *ignore) if not any(one.startswith(code) and code for one in known)]
    if wrong:
        problems = [f"{code!r} is the beginning of no code" for code in wrong]
        raise TraceproofError("The rules can not be chosen", problems=problems, todo=f"Codes: {', '.join(known)}.")
    return tuple(
        rule
        for rule in all_rules()
        if (not select or rule.code.startswith(tuple(select))) and not rule.code.startswith(tuple(ignore) or "\n")
    )


def lint(
    root: Path,  # a dataset folder
    *,
    select: Collection[str] = (),  # codes, or beginnings of codes, to run; empty for all
    ignore: Collection[str] = (),  # codes, or beginnings of codes, not to run
    baseline: Path | None = None,  # a file with known findings
    flashinfer: Path | None = None,  # where an unpacked FlashInfer lies; rules that need it say so without it
) -> Report:
    """Run the chosen rules over the dataset at `root`.

    Raises TraceproofError: no dataset, no baseline or no FlashInfer where one was said to be; unknown codes.
    """
    rules = chosen(select, ignore)
    known = read_baseline(baseline) if baseline is not None else None
    dataset = Dataset(read_tree(root), flashinfer)
    found: list[Finding] = []
    not_run: list[str] = []
    with paused_collection(), deep_recursion(DEEPEST):
        for rule in rules:
            if rule.needs_flashinfer and flashinfer is None:
                not_run.append(f"{rule.code} ({rule.title}) did not run: it needs --flashinfer-path")
            else:
                found += rule.findings(dataset)
    new, old, gone = split(_sorted(found), known) if known is not None else (_sorted(found), [], 0)
    return Report(tuple(new), tuple(old), gone, tuple(not_run), len(dataset.tree.definitions))


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda one: (one.path, one.line, one.code, one.field, one.evidence))
