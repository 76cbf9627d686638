"""The rule `extract`: the configured dataset and what was extracted for models, together in one folder."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from traceproof.config.schema import ModelChoice
from traceproof.dataset.fetch import FETCHED, scan_digest
from traceproof.extract.parallelism import pairs
from traceproof.extract.pipeline import Extraction, Model, Settings, extract, model_of, publish
from traceproof.extract.reports import not_described
from traceproof.files import disk_errors, write_json

DEFINITIONS = "definitions"


def run(  # noqa: PLR0913 - what, how, where from, where to
    choices: Sequence[ModelChoice],
    settings: Settings,
    *,
    dataset: Path,
    out: Path,
    report: Path,
    say: Callable[[str], None],
) -> Extraction:
    """Extract the models and put what `dataset` lacks, beside its own files, into `out`; `dataset` stays as it is.

    `out` changes only once all of it is there: its definitions are moved in with one rename. A conflict with the
    dataset is no error here: both definitions are there, and it stands in the report. Raises TraceproofError: a
    model can not be read, or a reference does not hold.
    """
    extraction = extract([_model(choice) for choice in choices], settings, say=say)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".extracting-", dir=out.parent) as scratch:
            merged = Path(scratch) / "merged"
            shutil.copytree(dataset / DEFINITIONS, merged / DEFINITIONS)
            publish(extraction, settings, dataset=dataset, out=merged, report=report, keep=False)
            link(dataset, out)
            if (out / DEFINITIONS).exists():
                (out / DEFINITIONS).rename(Path(scratch) / "before")
            (merged / DEFINITIONS).rename(out / DEFINITIONS)
    for outcome in extraction.outcomes:
        if outcome.status == "conflict":
            say(f"conflict: {outcome.name}: {'; '.join(outcome.differences)}")
    for line in not_described(extraction):
        say(line)
    models = [choice.model_dump(mode="json") for choice in choices]
    write_json(out / FETCHED, {"source": {"models": models}, "scan": scan_digest(out)})
    return extraction


def _model(choice: ModelChoice) -> Model:
    slug, tags, given, usual = model_of(choice.name, config=choice.config, repository=None)
    return Model(slug, tags, given, pairs(choice.tp, choice.ep, usual))


def link(dataset: Path, out: Path) -> None:
    """Link every file of `dataset` but its definitions into `out`: blobs may be large.

    Files that were written into `out` stay. Links to what `dataset` has no more go. Each file is a link of its
    own: what is written beside it or in its place then never reaches `dataset`.
    """
    for path in out.rglob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink()
    source = dataset.resolve()
    for path in source.rglob("*"):
        inner = path.relative_to(source)
        target = out / inner
        if inner.parts[0] in {DEFINITIONS, FETCHED, ".git"} or path.is_dir() or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
