"""`traceproof verify` and `traceproof doctor`: prove definitions right, and report what this machine can prove."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.cli import options, run
from traceproof.config import Config, ConfigSelection
from traceproof.dataset.tree import selected_by
from traceproof.digests import digest_json
from traceproof.environments.building import unlike_the_lock
from traceproof.errors import TraceproofError
from traceproof.programs import telling

SLUG_LENGTH = 60  # characters of the readable part of a folder's name
DOCTOR_SECONDS = 60.0
# Options that do not change the folder of a run's results, with neutral values.
SAME_RUN = {"force": False, "allow_weak_isolation": False}

Seconds = Annotated[
    float, typer.Option(min=1, help="Seconds that a stack's interpreter may take to import its packages.")
]


def verify(  # noqa: PLR0913 - the specification's options
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WHAT]...",
            help="Names of definitions or op_types, definitions' files, folders; what config.yaml selects if "
            "none.",
        ),
    ] = None,
    *,
    op_type: options.OpTypes = None,
    definition_name: options.DefinitionNames = None,
    case: options.Cases = None,
    everything: options.Everything = False,
    test_sizes: options.Sizes = None,
    tolerance: options.Tolerance = None,
    seed: options.Seed = None,
    force: options.Force = False,
    hidden_seed: Annotated[
        int | None, typer.Option(help="The number that hidden cases follow from; by default the results folder's.")
    ] = None,
    allow_weak_isolation: options.WeakIsolation = False,
    dataset: options.Dataset = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores to use; all of them if not given.")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Verify definitions' references and ground truths, and print the table. Arguments after `--` are Snakemake's.

    Exit codes: 0 fine, 1 findings, 2 bad use or input, or a run that could not finish, 130 interrupted: what is
    finished is kept, and the same command goes on from there.
    """
    try:
        if what:
            op_type, definition_name, dataset = _named(
                what, op_type, definition_name, dataset, everything=everything
            )
            everything = not (op_type or definition_name)
        elif everything and (op_type or definition_name):
            raise TraceproofError(options.ALL_AND_SOME)  # noqa: TRY301 - it is written as JSON, too
        keys = {"op_type": op_type, "definition_name": definition_name, "case": case, "all": everything}
        selection: dict[str, Any] = {key: value for key, value in keys.items() if value}
        if op_type or definition_name:  # a selection by name replaces that of config.yaml
            selection = {"op_type": [], "definition_name": [], "all": False, **selection}
        changes = run.without_none(
            selection=selection or None,
            dataset=run.dataset_in(dataset),
            test_sizes=test_sizes,
            tolerance=tolerance,
            seed=seed,
            force=force or None,
            hidden_seed=hidden_seed,
            allow_weak_isolation=allow_weak_isolation or None,
        )
        root, config = run.configured(**changes)
    except TraceproofError as error:
        run.write_result(json_file, {"exit_code": run.UNFINISHED, "error": str(error)})
        raise
    # A selection other than config.yaml's has a separate folder of results, so that it overwrites no other's.
    separate = folder_of(run.config_of(root, {}), config, changes)
    if separate:
        changes["run"] = separate
    for line in unlike_the_lock(config, root=root).values():
        run.say(f"note: {line}")
    extra = [*(["--forcerun", "verify"] if config.force else []), *(context.obj or [])]
    code = run.snakemake(
        root, changes, cores=cores or len(os.sched_getaffinity(0)), extra=extra, out=run.text_stream(json_file)
    )
    summary = root / config.results / (separate or config.run) / "summary.json"
    result: dict[str, Any] = {"exit_code": code}
    if code in {run.FINE, run.FINDINGS} and summary.is_file():
        result |= {"summary": str(summary), **json.loads(summary.read_text(encoding="utf-8"))}
    run.write_result(json_file, result)
    raise typer.Exit(code)


def _named(
    what: list[str], op_types: list[str] | None, names: list[str] | None, dataset: Path | None, *, everything: bool
) -> tuple[list[str], list[str], Path | None]:
    """The op_types, definitions and dataset that arguments name. Raises TraceproofError: one names nothing."""
    if everything or op_types or names:
        twice = f"{' '.join(what)} says what to verify, and so do --op-type, --definition-name and --all"
        raise TraceproofError(twice, todo="Give names, files and folders, or these options, not both.")
    selected = selected_by(what, run.configured_dataset, dataset)
    return list(selected.op_types), list(selected.definitions), selected.root or dataset


def folder_of(configured: Config, config: Config, changes: Mapping[str, Any]) -> str:
    """The folder below results for a selection other than the configured one; empty if they are the same."""

    def compared(settings: Config) -> Config:
        chosen = settings.selection
        meant = ConfigSelection(op_type=chosen.op_types, definition_name=chosen.definitions, case=chosen.case)
        return settings.model_copy(update={**SAME_RUN, "selection": meant})

    if compared(config) == compared(configured):
        return ""
    selection = changes.get("selection", {})
    names = [*selection.get("definition_name", []), *selection.get("op_type", []), *selection.get("case", [])]
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", "-".join(names))[:SLUG_LENGTH].strip("-") or "all"
    relevant = {key: value for key, value in changes.items() if key not in SAME_RUN}
    return f"selections/{readable}-{digest_json(relevant)[:8]}"


def doctor(*, seconds: Seconds = DOCTOR_SECONDS, json_file: options.JsonFile = None) -> None:
    """Report what this machine can prove, and what config.yaml needs that is missing. Builds and changes nothing.

    Exit codes: 0 all that is configured can run, 1 something of it is missing or broken, 2 bad use or input.
    """
    from traceproof.doctor import diagnose, screen

    root, config = run.configured()
    with telling("asking the stacks"):
        diagnosis = diagnose(config, root=root, seconds=seconds)
    run.end(json_file, diagnosis.model_dump(mode="json"), screen(diagnosis), bad=not diagnosis.able)
