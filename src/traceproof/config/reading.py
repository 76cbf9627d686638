"""Checking config.yaml: every problem at once, each with where it stands and what was expected."""

import json
import re
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from traceproof.checkouts.pins import DATASET, NAME, read_lock
from traceproof.config.schema import Config, ModelChoice, Selection
from traceproof.dataset.fetch import Dataset
from traceproof.dataset.tree import is_dataset, op_type_names
from traceproof.errors import TraceproofError
from traceproof.models import catalogue
from traceproof.ops import registry

LOCKED = "locked"  # in the place of a dataset: the one that sources.lock pins
OWN = frozenset({"selection", "seed", "hidden_seed", "force", "run", "gpu"})  # a row says these itself
Model = TypeVar("Model", bound=BaseModel)


def read_config(raw: Mapping[str, Any], *, root: Path, source: str = "config.yaml") -> Config:
    """Check config.yaml's mapping, overrides merged in, and freeze it. Raises TraceproofError: all problems."""
    problems: list[str] = []
    config: Config | None = None
    raw = _with_locked_dataset(_without_null_text(raw), root, problems)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        problems += _schema_problems(error)
    problems += _problems_on_disk(raw, root)
    if config is None or problems:
        raise TraceproofError(f"{source} cannot be used", problems=problems)
    return config


def _without_null_text(value: Any) -> Any:  # noqa: ANN401 - any value of YAML
    """`snakemake --config` gives every value inside a mapping as text; pydantic reads all of it but `null`."""
    if isinstance(value, Mapping):
        return {key: _without_null_text(inner) for key, inner in value.items()}
    return None if value == "null" else value


def _with_locked_dataset(raw: Mapping[str, Any], root: Path, problems: list[str]) -> Mapping[str, Any]:
    """The mapping, with what sources.lock pins in the place of `dataset: locked`."""
    if raw.get("dataset") != LOCKED:
        return raw
    try:
        pin = read_lock(root / NAME).get(DATASET)
    except TraceproofError as error:
        problems.append(f"dataset: {LOCKED}: {error}")
        pin = None
    else:
        if pin is None or (pin.package is not None and len(pin.digests) != 1):
            lacking = f"no {DATASET}" if pin is None else f"no sha256 of {DATASET}"
            todo = f"pin it: traceproof clone-repos {DATASET}"
            problems.append(f"dataset: {LOCKED}: {root / NAME} has {lacking}; {todo}")
            pin = None
    if pin is None:
        return {**raw, "dataset": {"git": {"url": "unknown", "commit": "0" * 40}}}  # so that no problem follows
    if pin.package is None:
        return {**raw, "dataset": {"git": {"url": pin.url, "commit": pin.commit}}}
    (sha256,) = pin.digests
    released = {"package": pin.package, "version": pin.version, "sha256": sha256, "folder": pin.folder or "."}
    return {**raw, "dataset": {"pypi": released}}


def _schema_problems(error: ValidationError) -> list[str]:
    details = error.errors(include_url=False)
    # A list of one wrong name counts as empty too: the name is what to report.
    inner = {detail["loc"][:-1] for detail in details}
    return [_explain(dict(one)) for one in details if one["type"] != "too_short" or one["loc"] not in inner]


def _problems_on_disk(raw: Mapping[str, Any], root: Path) -> list[str]:
    """What the schema can not know, of those parts that fit it, whatever is wrong with the others."""
    dataset = _valid(Dataset, raw.get("dataset"))
    selection = _valid(Selection, raw.get("selection", {}))
    known = raw.get("known")
    problems = _unusable_models(raw.get("models"), root)
    if isinstance(known, str) and not (root / known).is_file():
        problems.append(f"known: {root / known} does not exist; null means that nothing is known")
    results = raw.get("results")
    if isinstance(results, str) and (root / results).is_file():
        problems.append(f"results: {root / results} is a file; name a folder, which is made if there is none")
    path = None if dataset is None or dataset.path is None else root / dataset.path
    if path is not None and not path.is_dir():
        problems.append(f"dataset.path: {path} is not a folder")
    elif path is not None and not is_dataset(path):
        problems.append(f"dataset.path: {path} holds no definitions; expected definitions/<op_type>/<name>.json")
    elif selection is not None:
        problems += _unknown_op_types(selection, path)
    return problems


def _unusable_models(given: object, root: Path) -> list[str]:
    problems = []
    for index, value in enumerate(given if isinstance(given, list) else []):
        choice = _valid(ModelChoice, value)
        if choice is None:
            continue
        if choice.config is not None and not (root / choice.config).is_file():
            problems.append(f"models.{index}.config: {root / choice.config} does not exist")
        if choice.config is None and catalogue.slug_of(str(choice.name)) not in catalogue.entries():
            found = catalogue.suggestion(str(choice.name))
            problems.append(f"models.{index}.name: {choice.name!r} is not bundled, so give its config; {found}")
    return problems


def _valid(model: type[Model], value: object) -> Model | None:
    try:
        return model.model_validate(value)
    except ValidationError:
        return None


def _unknown_op_types(selection: Selection, path: Path | None) -> list[str]:
    """An op_type of one's own is fine where a dataset on disk has it; of one not here yet, planning will tell."""
    if path is None:
        return [_not_an_op_type(name, set()) for name in selection.op_types if not re.fullmatch(r"\w+", name)]
    folders = op_type_names(path)
    accepted = folders | set(registry.known())
    return [_not_an_op_type(name, folders) for name in selection.op_types if name not in accepted]


def _not_an_op_type(name: str, folders: set[str]) -> str:
    known = sorted({*registry.known(), *folders})
    close = get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"selection.op_type: {name!r} is not an op_type; {meant}known: {', '.join(known)}"


def _explain(found: Mapping[str, Any]) -> str:
    """One line for one pydantic error: where, what stands there, what was expected."""
    location = [str(part) for part in found["loc"]]
    where = ".".join(location) or "the file"
    given = repr(found["input"])
    shown = given if len(given) <= 60 else given[:57] + "..."  # a whole mapping would bury the message
    match found["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key; {_known_keys(location)}"
        case "missing":
            return f"{where}: missing"
        case "value_error":
            return f"{where}: {found['msg'].removeprefix('Value error, ')}"
        case "string_pattern_mismatch":
            return f"{where}: {shown} does not have the form {found['ctx']['pattern']}"
        case _:
            return f"{where}: {shown}: {found['msg'][0].lower()}{found['msg'][1:]}"


def _known_keys(location: list[str]) -> str:
    model: type[BaseModel] = Config
    for part in location[:-1]:
        if part.isdigit():  # an item of a list
            continue
        annotation = model.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(one for one in options if isinstance(one, type) and issubclass(one, BaseModel))
    close = get_close_matches(location[-1], model.model_fields, n=1)
    known = f"known: {', '.join(model.model_fields)}"
    return f"did you mean {close[0]!r}? {known}" if close else known


def raw_config(root: Path) -> dict[str, Any]:
    """What config.yaml holds. Raises TraceproofError: it can not be read, or is no mapping."""
    path = root / "config.yaml"
    try:
        value = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise TraceproofError("config.yaml cannot be used", problems=[str(error)]) from error
    if not isinstance(value, dict):
        raise TraceproofError("config.yaml cannot be used", problems=["the file: it must be a mapping of keys"])
    return value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, mappings merged key by key as Snakemake does it."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def config_of(root: Path, changes: Mapping[str, Any]) -> Config:
    """The configuration of one run. Raises TraceproofError: it can not be used."""
    source = "config.yaml with these options" if changes else "config.yaml"
    return read_config(merged(raw_config(root), changes), root=root, source=source)


def repeat_options(config: Config, root: Path) -> str:
    """Options of a command that repeats a case: what a run's configuration has otherwise than config.yaml."""
    try:
        written = config_of(root, {})
    except TraceproofError:  # the run was given another file
        return ""
    changed = [key for key in Config.model_fields if getattr(config, key) != getattr(written, key)]
    parts: list[str] = []
    overrides: list[str] = []
    for key in (key for key in changed if key not in OWN):
        value = config.model_dump(mode="json")[key]
        if key == "dataset" and config.dataset.path is not None:
            parts += ["--dataset", str(config.dataset.path)]
        elif key == "test_sizes":
            parts += ["--test-sizes", *config.test_sizes]
        elif key == "allow_weak_isolation" and value:
            parts.append("--allow-weak-isolation")
        elif key == "tolerance" and value is not None:
            parts += ["--tolerance", f"{value:g}"]
        else:
            overrides.append(f"{key}={json.dumps(value)}")
    return shlex.join([*parts, *(["--", "--config", *overrides] if overrides else [])])
