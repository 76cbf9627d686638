"""`traceproof verify`: verify what config.yaml selects, or a narrower selection in a folder of its own."""

import json
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.cli import options, run
from traceproof.cli.interpreter import say
from traceproof.config.schema import Config
from traceproof.dataset.tree import wanted
from traceproof.digests import digest_json
from traceproof.environments.building import unlike_the_lock
from traceproof.errors import TraceproofError
from traceproof.run.flow import Pipeline

SLUG_LENGTH = 60  # of the readable part of a folder's name


HiddenSeed = Annotated[
    int | None, typer.Option(help="What hidden cases follow from; one of this results folder if not given.")
]
Solutions = Annotated[
    bool, typer.Option("--solutions", help="Then judge the dataset's solutions for what is selected.")
]


What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[WHAT]...",
        help="Names of definitions or op_types, definitions' files, folders; what config.yaml selects if none.",
    ),
]


def verify(  # noqa: PLR0913 - the specification's options
    context: typer.Context,
    what: What = None,
    *,
    op_type: Annotated[list[str] | None, typer.Option(help="Verify these op_types.")] = None,
    definition_name: Annotated[list[str] | None, typer.Option(help="Verify these definitions.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Verify these cases only, e.g. small-0.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Verify every definition.")] = False,
    test_sizes: Annotated[list[str] | None, typer.Option(help="Sizes: small medium large stress.")] = None,
    tolerance: options.Tolerance = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run again what is finished already.")] = False,
    hidden_seed: HiddenSeed = None,
    allow_weak_isolation: options.WeakIsolation = False,
    dataset: options.Dataset = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores to use; all of them if not given.")] = None,
    solutions: Solutions = False,
    json_file: options.JsonFile = None,
) -> None:
    """Verify definitions against every truth there is; prints the table. What stands behind `--` is Snakemake's.

    Exit codes: 0 fine, 1 findings, 2 bad use or input, or a run that could not finish, 130 interrupted: what is
    finished is kept, and the same command goes on from there.
    """
    if everything and (op_type or definition_name):
        raise TraceproofError("--all selects everything: give it, or --op-type and --definition-name, not both")
    if what and (everything or op_type or definition_name):
        raise TraceproofError(
            f"{' '.join(what)} says what to verify, and so do --op-type, --definition-name and --all",
            todo="Give names, files and folders, or these options, not both.",
        )
    if what:
        try:
            found = wanted(what, run.configured_dataset, dataset)
        except TraceproofError as error:
            run.write_result(json_file, {"exit_code": run.UNFINISHED, "error": str(error)})
            raise
        dataset = found.root or dataset
        op_type, definition_name = list(found.op_types), list(found.definitions)
        everything = not (op_type or definition_name)
    changes = run.given(
        selection=_selection(op_type=op_type, definition_name=definition_name, case=case, all=everything),
        dataset=run.dataset_in(dataset),
        test_sizes=test_sizes,
        tolerance=tolerance,
        seed=seed,
        force=force or None,
        hidden_seed=hidden_seed,
        allow_weak_isolation=allow_weak_isolation or None,
    )
    code = _verify(changes, cores or run.all_cores(), context.obj or [], json_file)
    if solutions and code in {run.FINE, run.FINDINGS}:
        with redirect_stdout(run.told(json_file)):
            code = max(code, _solutions(changes))
    raise typer.Exit(code)


def _solutions(changes: Mapping[str, Any]) -> int:
    """Judge the dataset's solutions for the selected definitions."""
    from traceproof.solutions.session import JUDGED, SUMMARY, Session  # a fifth of what the command imports

    root, config = run.configured(**changes)
    flow = Pipeline(config, root)
    session = Session(
        root=root, config=config, out=root / flow.results / JUDGED, say=say, dataset=root / flow.dataset
    )
    refused = session.judge_folder(session.selected(), root / flow.run / SUMMARY)
    return run.FINDINGS if refused else run.FINE


def _selection(**given: list[str] | bool | None) -> dict[str, Any] | None:
    """Selection to put in place of config.yaml's; what is chosen by name is not added to what stands there."""
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value}
    if "op_type" in chosen or "definition_name" in chosen:
        chosen = {"op_type": [], "definition_name": [], "all": False, **chosen}
    return chosen or None


def _verify(changes: dict[str, Any], cores: int, extra: list[str], json_file: Path | None) -> int:
    root = run.repository()
    try:
        config = run.config_of(root, changes)
    except TraceproofError as error:
        run.write_result(json_file, {"exit_code": run.UNFINISHED, "error": str(error)})
        raise
    narrower = _folder(run.config_of(root, {}), config, changes)
    if narrower:
        changes["run"] = narrower
    for line in unlike_the_lock(config, root=root).values():
        say(f"note: {line}")
    forced = ["--forcerun", "verify"] if config.force else []
    code = run.snakemake(root, changes, cores=cores, extra=[*forced, *extra], out=run.told(json_file))
    summary = root / config.results / (narrower or config.run) / "summary.json"
    result: dict[str, Any] = {"exit_code": code}
    if code in {run.FINE, run.FINDINGS} and summary.is_file():
        result |= {"summary": str(summary), **json.loads(summary.read_text(encoding="utf-8"))}
    run.write_result(json_file, result)
    return code


def _folder(configured: Config, config: Config, changes: Mapping[str, Any]) -> str:
    """The folder below results for a selection other than the configured one; empty: it is the same."""
    same = {"force": False, "allow_weak_isolation": False, "selection": _effective(configured)}
    if config.model_copy(update=same | {"selection": _effective(config)}) == configured.model_copy(update=same):
        return ""
    selection = changes.get("selection", {})
    names = [*selection.get("definition_name", []), *selection.get("op_type", []), *selection.get("case", [])]
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", "-".join(names))[:SLUG_LENGTH].strip("-") or "all"
    relevant = {key: value for key, value in changes.items() if key not in {"force", "allow_weak_isolation"}}
    return f"selections/{readable}-{digest_json(relevant)[:8]}"


def _effective(config: Config) -> Any:  # noqa: ANN401 - a Selection, compared and never read
    chosen = config.selection
    return chosen.model_copy(
        update={"op_type": chosen.op_types, "definition_name": chosen.definitions, "all": False}
    )
