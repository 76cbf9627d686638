"""`traceproof publish`: opens pull requests to the dataset with what was proved; none without --push."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.cli import options, run
from traceproof.dataset.fetch import folder_of
from traceproof.environments.building import resolve
from traceproof.errors import TraceproofError
from traceproof.names import path_part
from traceproof.programs import telling
from traceproof.publish.pull_request import Per, Source, base_of, checked, dry_run, prepare, provenance
from traceproof.publish.push import Hub
from traceproof.stacks import MAIN
from traceproof.text import printable, redacted

DATASET = "flashinfer-ai/flashinfer-trace"

Push = Annotated[bool, typer.Option("--push", help="Open the pull requests, or bring them up to date.")]
Traces = Annotated[list[Path] | None, typer.Option(help="Folder with measured traces, in the dataset's layout.")]
Dataset = Annotated[
    Path | None, typer.Option(help="The dataset that was verified, if not the configured one; with --selection.")
]


def publish(  # noqa: PLR0913 - one parameter per option
    *,
    definition_name: options.DefinitionNames = None,
    op_type: options.OpTypes = None,
    per: Annotated[Per, typer.Option(help="One pull request for each of what.")] = "definition",
    push: Push = False,
    repository: Annotated[str, typer.Option(help="The dataset on the hub, <owner>/<name>.")] = DATASET,
    endpoint: Annotated[str, typer.Option(help="The hub's address; HF_ENDPOINT if left out.")] = "",
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Let existing files change; the description says how.")
    ] = False,
    traces: Traces = None,
    dataset: Dataset = None,
    selection: options.Selection = "",
    out: options.Out = None,
    json_file: options.JsonFile = None,
) -> None:
    """Publish what was verified; a dry run unless --push is given.

    Exit codes: 0 written or pushed, 2 bad use or input, nothing verified, or a failed push.
    """
    hub = Hub(repository, endpoint=endpoint, say=_say) if push else None
    if hub is not None:  # before all work: a token that is missing or no longer valid
        _say(f"{hub.endpoint}: {hub.owner}")
    source = _source(dataset, selection, traces or [])
    folder = out or source.run / "publish"
    _say("preparing what is verified: baselines, workloads, tests")
    with telling("preparing"):
        pull_requests = prepare(source, definitions=definition_name or [], op_types=op_type or [], per=per)
    base = base_of(source)
    listed = [dry_run(item, base, folder, allow_changes=allow_changes) for item in pull_requests]
    for item in pull_requests:
        checked(item, base, allow_changes=allow_changes)
    for made in listed:
        name, sizes = made["pull_request"], [int(file["size"]) for file in made["files"]]
        line = f"{name}: {len(sizes)} files, {sum(sizes)} bytes: {folder / path_part(name)}\n"
        run.text_stream(json_file).write(line)
    pushed: list[dict[str, Any]] = []
    for item in pull_requests:
        if hub is None:
            break
        with telling(f"publishing {item.slug}"):
            done = hub.push(item, allow_changes=allow_changes)
        what = f"committed {done.files} files" if done.committed else "it holds all of it already"
        _say(f"{item.slug}: {done.where}: {what}")
        pushed.append({"pull_request": item.slug, "where": done.where, "committed": done.committed})
    value = {"exit_code": run.FINE, "pull_requests": listed, "pushed": pushed}
    run.end(json_file, value, "" if push else "dry run: nothing was sent; --push opens the pull requests\n")


def _say(line: str) -> None:
    run.say(printable(redacted(line)))


def _source(dataset: Path | None, selection: str, traces: Sequence[Path]) -> Source:
    """The verified run and dataset to publish from."""
    root, config = run.configured()
    results = root / config.results
    missing = [str(path) for path in traces if not path.exists()]
    if missing:
        raise TraceproofError("some paths given do not exist", problems=missing)
    published = root / folder_of(config.dataset, root=results / "dataset")
    python = Path(resolve(config, MAIN).python)
    verified = results / "extract" / "dataset" if config.models else published
    if dataset is not None and not selection and dataset.resolve() != verified.resolve():
        todo = f"Give --selection selections/NAME, a folder of {results / 'selections'}."
        raise TraceproofError(f"--dataset {dataset}: which run verified it is not said", todo=todo)
    return Source(
        root=root,
        dataset=verified if dataset is None else dataset.absolute(),
        base=published,
        run=results / (selection or config.run),
        python=str(python if python.is_absolute() else root / python),
        provenance=provenance(root, config.dataset),
        traces=tuple(path.absolute() for path in traces),
    )
