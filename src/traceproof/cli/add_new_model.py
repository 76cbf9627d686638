"""`traceproof add-new-model`: a model's module hierarchy for the web interface."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from traceproof.cli import options
from traceproof.cli.extract import interpreter
from traceproof.errors import TraceproofError
from traceproof.extract import config_json, hierarchy
from traceproof.extract.config_json import pairs
from traceproof.extract.pipeline import Choices, definitions_of, model_of
from traceproof.extract.reading import ReaderEnvironment
from traceproof.extract.reports import told
from traceproof.models import catalogue
from traceproof.models.reading import Kernel, Module, Reading
from traceproof.ops.drafts import Draft
from traceproof.stacks import READER


def add_new_model(  # noqa: PLR0913 - one parameter per option
    *,
    model_name: Annotated[str, typer.Option(help="The model's name, e.g. deepseek-v3; its id in models.ts.")],
    hf_repo_id: Annotated[str | None, typer.Option(help="Its HuggingFace repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of --hf-repo-id.")] = None,
    config: Annotated[Path | None, typer.Option(help="Its config.json, instead of fetching one.")] = None,
    tp: Annotated[list[int] | None, typer.Option(help="Tensor parallel ranks.")] = None,
    ep: Annotated[list[int] | None, typer.Option(help="Expert parallel ranks.")] = None,
    models_ts: Annotated[
        Path | None, typer.Option(help="Insert into this models.ts; printed if left out.")
    ] = None,
    json_file: options.JsonFile = None,
    sglang_path: options.Sglang = None,
    extract_python: options.SglangPython = None,
) -> None:
    """Write the modules of a model (block or layer, parent, count, definitions) for the web interface.

    A bundled model's facts are used where neither --config nor --revision asks for others, so that no network is
    needed. Exit codes: 0 written, 2 bad use or input.
    """
    bundled = catalogue.entries().get(catalogue.slug_of(model_name))
    fetched = hf_repo_id if bundled is None or revision is not None else None
    slug, tags, given, usual = model_of(model_name, config=config, repository=fetched, revision=revision)
    parallels = pairs(tp or [], ep or [], usual)
    environment = ReaderEnvironment(interpreter(READER, extract_python), sglang_path)
    named: dict[str, list[str]] = {}
    readings: list[Reading] = []
    for parallel in parallels:
        config_json.check(given, parallel, where=f"config.json of {slug}")
        reading = environment.read(given, parallel)
        label = f"{slug} tp{parallel.tp} ep{parallel.ep}"
        made, left, _ = definitions_of(label, reading, given, Choices())
        _name_definitions(named, reading, made)
        sys.stderr.write("".join(f"not described: {told(item)}\n" for item in left))
        readings.append(reading)
    title, found = bundled.title if bundled is not None else model_name, hierarchy.nodes(readings[0], named)
    model = hierarchy.as_json(found, identity=model_name, name=title, description=f"{title} ({', '.join(tags)}).")
    _write(model, models_ts, json_file)


def _name_definitions(named: dict[str, list[str]], reading: Reading, made: list[tuple[Kernel, Draft]]) -> None:
    """Add each module's definitions by path; a router's top-k has those of the experts beside it."""
    selectors: dict[str | None, list[Module]] = {}
    for module in reading.modules:
        if module.kind == "top_k":
            selectors.setdefault(module.parent, []).append(module)
    for call, draft in made:
        places = list(call.paths)
        if call.kind == "experts":
            places += [item.path for path in call.paths for item in selectors.get(path.rpartition(".")[0], [])]
        for path in places:
            names = named.setdefault(path, [])
            if draft.name not in names:
                names.append(draft.name)


def _write(model: dict[str, object], models_ts: Path | None, json_file: Path | None) -> None:
    if models_ts is None and json_file is None:
        sys.stdout.write(hierarchy.typescript(model))
        return
    try:
        if models_ts is not None:
            old = models_ts.read_bytes().decode("utf-8")
            partial = models_ts.with_name(f".{models_ts.name}.partial")
            partial.write_bytes(hierarchy.inserted(old, model).encode("utf-8"))
            partial.replace(models_ts)
        if json_file is not None:
            json_file.write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceproofError(f"the model cannot be written: {error}", todo="Check the paths given.") from error
