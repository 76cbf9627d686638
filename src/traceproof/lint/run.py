"""Linting a dataset."""

import sys
from collections.abc import Collection
from pathlib import Path

from traceproof.dataset.tree import paused_collection, read_tree
from traceproof.lint import definitions, workloads
from traceproof.lint.definitions import OF_DEFINITION
from traceproof.lint.model import LintedDataset, LintReport, chosen, reported

OF_DATASET = (*definitions.OF_DATASET, *workloads.OF_DATASET)
NEEDS_FLASHINFER = "TP422"  # rule that needs an unpacked FlashInfer
DEEPEST = 50_000  # Python frames: a walk takes about five per level, and the parser accepts about 3,000 levels


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
    rules = chosen("TP", select, ignore)
    dataset = LintedDataset(read_tree(root), flashinfer)
    not_run: tuple[str, ...] = ()
    if flashinfer is None and (rule := rules.get(NEEDS_FLASHINFER)) is not None:
        not_run = (f"{rule.code} ({rule.title}) did not run: it needs --flashinfer-path",)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEPEST))
    try:
        with paused_collection():
            every = [item for check in OF_DATASET for item in check(dataset)]
            for subject in dataset.subjects:
                every += [item._replace(path=subject.path) for check in OF_DEFINITION for item in check(subject)]
    finally:
        sys.setrecursionlimit(before)
    read = {"definitions": len(dataset.tree.definitions)}
    return reported((item for item in every if item.code in rules), read, baseline, not_run)
