"""`traceproof publish`: what was proved, as a pull request to the dataset. Without --push nothing is sent."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from traceproof.cli import options, run
from traceproof.dataset.fetch import folder_of
from traceproof.environments.building import resolve
from traceproof.errors import TraceproofError
from traceproof.programs import telling
from traceproof.publish.coverage import coverage_branch
from traceproof.publish.prepare import (
    Per,
    Prepared,
    Source,
    dry_run,
    prepare,
    prepare_card,
    provenance,
)
from traceproof.publish.push import Hub, Remote
from traceproof.stacks import MAIN
from traceproof.text import printable, redacted

DATASET = "flashinfer-ai/flashinfer-trace"
COVERAGE = "docs/model_coverage.mdx"


PerWhat = Annotated[Per, typer.Option(help="One pull request for each of what.")]
Push = Annotated[bool, typer.Option("--push", help="Open the pull requests, or bring them up to date.")]
Repository = Annotated[str, typer.Option(help="The dataset on the hub, <owner>/<name>.")]
Endpoint = Annotated[str, typer.Option(help="The hub's address; HF_ENDPOINT if left out.")]
GitRemote = Annotated[
    str, typer.Option(metavar="URL", help="Push branches to this git remote instead of the hub.")
]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="Let existing files change; the description says how.")
]
Traces = Annotated[list[Path] | None, typer.Option(help="Folder with measured traces, in the dataset's layout.")]
Tests = Annotated[list[Path] | None, typer.Option(help="Folder with generated tests, in the dataset's layout.")]
WithoutTests = Annotated[
    bool, typer.Option("--without-tests", help="Generate no reference tests for definitions that have none.")
]
TestsOutput = Annotated[Path | None, typer.Option(help="What the tests printed, for the description.")]
Card = Annotated[
    bool, typer.Option("--card", help="Also the card that the hub's viewer needs; never over another's.")
]
CoverageClone = Annotated[
    Path | None, typer.Option(help="Prepare the coverage document's pull request as a branch of this clone.")
]
CoverageFile = Annotated[str, typer.Option(help="The coverage document in that clone.")]
Dataset = Annotated[
    Path | None, typer.Option(help="The dataset that was verified, if not the configured one; with --selection.")
]


def publish(  # noqa: PLR0913 - one parameter per option
    *,
    definition_name: options.DefinitionNames = None,
    op_type: options.OpTypes = None,
    per: PerWhat = "definition",
    push: Push = False,
    repository: Repository = DATASET,
    endpoint: Endpoint = "",
    git_remote: GitRemote = "",
    allow_changes: AllowChanges = False,
    traces: Traces = None,
    tests: Tests = None,
    without_tests: WithoutTests = False,
    tests_output: TestsOutput = None,
    card: Card = False,
    coverage_clone: CoverageClone = None,
    coverage_file: CoverageFile = COVERAGE,
    dataset: Dataset = None,
    selection: options.Selection = "",
    out: options.Out = None,
    json_file: options.JsonFile = None,
) -> None:
    """Publish what was verified; a dry run unless --push is given.

    Exit codes: 0 written or pushed, 2 bad use or input, nothing verified, or a push that did not go through.
    """
    source = _source(dataset, selection, [*(traces or []), *(tests or [])], tests_output, tests=not without_tests)
    folder = out or source.run / "publish"
    told = run.told(json_file)
    with _writable():
        _say("preparing what is verified: baselines, workloads, tests")
        with telling("preparing"):
            made = prepare(source, definitions=definition_name or [], op_types=op_type or [], per=per)
        made += [prepare_card(source, made[0].ledger)] if card else []
        listed = [dry_run(item, folder, allow_changes=allow_changes) for item in made]
    for item in listed:
        size = sum(int(file["size"]) for file in item["files"])
        told.write(f"{item['bundle']}: {len(item['files'])} files, {size} bytes: {folder / item['bundle']}\n")
    pushed: list[dict[str, Any]] = []
    if push:
        target = Remote(git_remote) if git_remote else Hub(repository, endpoint=endpoint, say=_say)
        pushed = _push(target, made, allow_changes=allow_changes)
    else:
        told.write("dry run: nothing was sent; --push opens the pull requests\n")
    if coverage_clone is not None:
        _coverage(coverage_clone, coverage_file, made[0], folder, told)
    run.write_result(json_file, {"exit_code": run.FINE, "bundles": listed, "pushed": pushed})


@contextmanager
def _writable() -> Iterator[None]:
    """Tell of a folder that can not be written, before anything is sent."""
    try:
        yield
    except OSError as error:
        raise TraceproofError(
            f"{error.filename or 'the dry run'} cannot be written: {error.strerror or error}",
            todo="Check the folder's permissions and the space there, or give another one with --out.",
        ) from error


def _say(line: str) -> None:
    sys.stderr.write(f"{printable(redacted(line))}\n")
    sys.stderr.flush()


def _push(target: Remote | Hub, made: Sequence[Prepared], *, allow_changes: bool) -> list[dict[str, Any]]:
    pushed = []
    for item in made:
        with telling(f"publishing {item.bundle.slug}"):
            outcome = target.push(item.bundle, item.describe, allow_changes=allow_changes)
        what = f"committed {outcome.files} files" if outcome.committed else "it holds all of it already"
        sys.stderr.write(f"{item.bundle.slug}: {outcome.where}: {what}\n")
        pushed.append({"bundle": item.bundle.slug, "where": outcome.where, "committed": outcome.committed})
    return pushed


def _coverage(clone: Path, file: str, made: Prepared, folder: Path, told: TextIO) -> None:
    provenance = made.source.provenance
    origin = f"Dataset: {provenance['dataset']}; traceproof {provenance['traceproof'] or 'of no commit'}."
    branch = coverage_branch(clone, file, made.coverage, origin=origin, out=folder)
    what = "a commit" if branch.committed else "nothing new"
    told.write(f"coverage: {what} on {branch.branch} ({branch.base}); text: {branch.text}\n")
    told.write(f"coverage: to push it: {branch.command}\n")


def _source(
    dataset: Path | None, selection: str, extra: list[Path], tests_output: Path | None, *, tests: bool
) -> Source:
    root, config = run.configured()
    results = root / config.results
    missing = [str(path) for path in (*extra, *([tests_output] if tests_output else [])) if not path.exists()]
    if missing:
        raise TraceproofError("some paths given do not exist", problems=missing)
    published = root / folder_of(config.dataset, root=results / "dataset")
    python = Path(resolve(config, MAIN).python)
    verified = results / "extract" / "dataset" if config.models else published
    return Source(
        root=root,
        dataset=verified if dataset is None else dataset.absolute(),
        base=published,
        run=results / (selection or config.run),
        results=results,
        python=str(python if python.is_absolute() else root / python),
        provenance=provenance(root, config.dataset),
        extra=tuple(path.absolute() for path in extra),
        tests=tests,
        tests_output=tests_output.read_text(encoding="utf-8") if tests_output else "",
    )
