"""Linting a dataset."""

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from traceproof.dataset.tree import paused_collection, read_tree
from traceproof.lint import definitions, model, workloads
from traceproof.lint.model import Finding, LintedDataset, LintReport

NEEDS_FLASHINFER = "TP422"  # rule that needs an unpacked FlashInfer
DEEPEST = 50_000  # Python frames: a walk takes about five per level, and the parser accepts about 3,000 levels


def findings(dataset: LintedDataset) -> Iterator[Finding]:
    """The findings of all checks."""
    for check in (*definitions.OF_DATASET, *workloads.OF_DATASET):
        yield from check(dataset)
    for subject in dataset.subjects:
        for of_one in definitions.OF_DEFINITION:
            yield from (one._replace(path=subject.path) for one in of_one(subject))


def lint(
    root: Path,  # a dataset folder
    *,
    select: Collection[str] = (),  # codes, or starts of codes, to run; empty: all
    ignore: Collection[str] = (),  # codes, or starts of codes, not to run
    baseline: Path | None = None,  # file of known findings
    # an unpacked FlashInfer; rules that need it are reported as not run without it
    flashinfer: Path | None = None,
) -> LintReport:
    """Check the dataset at `root` by the chosen rules.

    Raises TraceproofError: the dataset, the baseline or FlashInfer is not where it should be, or a code is
    unknown.
    """
    rules = model.chosen("TP", select, ignore)
    dataset = LintedDataset(read_tree(root), flashinfer)
    not_run: tuple[str, ...] = ()
    if flashinfer is None and (one := rules.get(NEEDS_FLASHINFER)) is not None:
        not_run = (f"{one.code} ({one.title}) did not run: it needs --flashinfer-path",)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEPEST))
    try:
        with paused_collection():
            found = [one for one in findings(dataset) if one.code in rules]
    finally:
        sys.setrecursionlimit(before)
    return model.reported(found, {"definitions": len(dataset.tree.definitions)}, baseline, not_run)
