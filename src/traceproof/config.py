"""config.yaml: a closed schema, read once into a frozen object, which all other code uses.

All problems are reported at once, each with its place and what was expected.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from traceproof.checkouts.pins import DATASET, NAME, read_lock
from traceproof.dataset.fetch import CLOSED, Dataset, Short, Text
from traceproof.dataset.tree import is_dataset, read_tree
from traceproof.errors import TraceproofError
from traceproof.judge.kernel_properties import DEMANDED, PROPERTIES
from traceproof.models import catalogue
from traceproof.ops import registry
from traceproof.ops.cases import ALL_SIZES
from traceproof.stacks import STACKS, TRUTHS, Stack
from traceproof.text import of_files

if TYPE_CHECKING:
    from traceproof import sandbox

Names = tuple[Text, ...]
Model = TypeVar("Model", bound=BaseModel)
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Ranks of a parallelism; a number is short for a list with it alone.
Ranks = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else (value,)),
]

# Whether jobs use a GPU, or its model; `--config gpu=true` passes a text.
Gpu = Annotated[
    Literal["auto"] | bool | Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]+$")],
    BeforeValidator(
        lambda value: {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
    ),
]


class ConfigSelection(BaseModel):
    """Selects the definitions to verify, and their cases; an empty list selects all."""

    model_config = CLOSED
    op_type: Names = ()
    definition_name: Names = ()
    case: Names = ()
    all: bool = False

    @property
    def op_types(self) -> tuple[str, ...]:
        """The op_types to plan; empty: all."""
        return () if self.all else self.op_type

    @property
    def definitions(self) -> tuple[str, ...]:
        """The definition names to plan; empty: all."""
        return () if self.all else self.definition_name


class StackSettings(BaseModel):
    """Settings of a stack's environment; each stack has only the keys that apply to it.

    Attributes:
        python: an interpreter with the packages; None: it is built here from envs/.
        env: `auto` takes CUDA if the machine has it.
        source: takes the stack's package from a checkout: `locked`, or a folder.
        cuda_home: the machine's CUDA toolkit to compile kernels with; None: that of the pinned wheels.
    """

    model_config = CLOSED
    python: Text | None = None

    def get(self, key: Literal["env", "source", "cuda_home"]) -> str | None:
        """The value of a key that not every stack has; None: unset, or no such key."""
        value: str | None = getattr(self, key, None)
        return value


class StackTable(BaseModel):
    """The stacks by name; `Stacks` has a field for each stack."""

    model_config = CLOSED

    def __getitem__(self, name: str) -> StackSettings:
        """The settings of the stack with this name."""
        settings: StackSettings = getattr(self, name)
        return settings


def _settings(stack: Stack) -> type[StackSettings]:
    fields: dict[str, Any] = {}
    if stack.cpu:
        fields["env"] = (Literal["auto", "cpu", "cuda"], "auto")
    if stack.origin is not None:
        fields["source"] = (Text | None, None)
    if stack.toolkit:
        fields["cuda_home"] = (Text | None, None)
    return create_model(f"StackSettings_{stack.name}", __base__=StackSettings, **fields)


if TYPE_CHECKING:
    Stacks = StackTable
else:
    kinds = {name: _settings(stack) for name, stack in STACKS.items()}
    Stacks = create_model("Stacks", __base__=StackTable, **{name: (kind, kind()) for name, kind in kinds.items()})


class CaseLimits(BaseModel):
    """Limits of one case, or one build; a case beyond them gets an `error` (or, by estimate, a skip)."""

    model_config = CLOSED
    wall_s: Positive = 120.0
    memory_gb: Positive = 10.0
    output_mb: Positive = 1.0
    build_s: Positive = 900.0

    def of_call(self, *, cases: int = 1) -> "sandbox.Limits":
        """Limits for the sandbox; a call that runs several cases gets the time of all."""
        from traceproof import sandbox  # slow to import, and few users of a configuration need it

        return sandbox.Limits(
            seconds=cases * self.wall_s,
            memory_bytes=int(self.memory_gb * sandbox.GIB),
            output_bytes=int(self.output_mb * sandbox.MIB),
        )


def _among(value: tuple[str, ...], known: Iterable[str], what: str) -> tuple[str, ...]:
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no {what}; known: {', '.join(known)}")
    return value


class Solutions(BaseModel):
    """Demands on solutions beyond correct answers."""

    model_config = CLOSED
    demanded: Names = DEMANDED

    @field_validator("demanded")
    @classmethod
    def _known_properties(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _among(value, PROPERTIES, "property of kernels")


class ModelChoice(Short):
    """A model whose definitions are extracted first; a text is short for its `name`."""

    SHORT = "name"
    name: Text | None = None
    config: Path | None = None
    tp: Ranks = ()
    ep: Ranks = ()

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.name is None and self.config is None:
            raise ValueError("give the 'name' of a bundled model, or the path of a config.json as 'config'")
        return self


class Config(BaseModel):
    """The content of config.yaml, which explains each key."""

    model_config = CLOSED
    dataset: Dataset
    models: tuple[ModelChoice, ...] = ()
    selection: ConfigSelection = ConfigSelection()
    test_sizes: Annotated[tuple[Literal["small", "medium", "large", "stress"], ...], Field(min_length=1)] = (
        "small",
        "medium",
    )
    workloads: Literal["auto"] | bool = "auto"
    truths: Names = tuple(TRUTHS)
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    force: bool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    stacks: Stacks = Stacks()
    limits: CaseLimits = CaseLimits()
    solutions: Solutions = Solutions()
    hidden_seed: Annotated[int, Field(ge=0, lt=1 << 48)] | None = None
    allow_weak_isolation: bool = False
    known: Path | None = None
    results: Path = Path("results")
    gpu: Gpu = "auto"
    run: Annotated[
        str, StringConstraints(pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*)?$")
    ] = ""

    @field_validator("truths", mode="before")
    @classmethod
    def _every_truth(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        return tuple(TRUTHS) if value == "all" else value

    @field_validator("truths")
    @classmethod
    def _known_truths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in TRUTHS if name in _among(value, TRUTHS, "ground truth"))

    @field_validator("test_sizes")
    @classmethod
    def _in_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(size for size in ALL_SIZES if size in value)  # in the usual order, without repeats


# Reading and checking the file.

LOCKED = "locked"  # instead of a dataset: the one pinned in sources.lock
# a command that repeats a row has these from the row
OWN = frozenset({"selection", "seed", "hidden_seed", "force", "run", "gpu"})


def read_config(raw: Mapping[str, Any], *, root: Path, source: str = "config.yaml") -> Config:
    """Check config.yaml's mapping, overrides merged in. Raises TraceproofError: with all problems."""
    problems: list[str] = []
    config: Config | None = None
    raw = _with_locked_dataset(_without_null_text(raw), root, problems)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # A list with one wrong name also counts as too short: only the name is reported.
        inner = {item["loc"][:-1] for item in details}
        problems += [
            _explain(dict(item)) for item in details if item["type"] != "too_short" or item["loc"] not in inner
        ]
    problems += _problems_on_disk(raw, root)
    if config is None or problems:
        raise TraceproofError(f"{source} cannot be used", problems=problems)
    return config


def _without_null_text(value: Any) -> Any:  # noqa: ANN401 - any value of YAML
    """The value with "null" as None: `snakemake --config` passes texts, of which pydantic reads all but that."""
    if isinstance(value, Mapping):
        return {key: _without_null_text(inner) for key, inner in value.items()}
    return None if value == "null" else value


def _with_locked_dataset(raw: Mapping[str, Any], root: Path, problems: list[str]) -> Mapping[str, Any]:
    """The mapping with `dataset: locked` replaced by what sources.lock pins; adds to `problems`."""
    if raw.get("dataset") != LOCKED:
        return raw
    # a placeholder, so that no further problem is reported
    dataset: dict[str, Any] = {"git": {"url": "unknown", "commit": "0" * 40}}
    try:
        pin = read_lock(root / NAME).get(DATASET)
    except TraceproofError as error:
        problems.append(f"dataset: {LOCKED}: {error}")
        return {**raw, "dataset": dataset}
    if pin is not None and pin.package is None:
        dataset = {"git": {"url": pin.url, "commit": pin.commit}}
    elif pin is not None and len(pin.digests) == 1:
        release = {"package": pin.package, "version": pin.version, "folder": pin.folder or "."}
        dataset = {"pypi": {**release, "sha256": next(iter(pin.digests))}}
    else:
        lacking = f"no {DATASET}" if pin is None else f"no sha256 of {DATASET}"
        todo = f"pin it: traceproof clone-repos {DATASET}"
        problems.append(f"dataset: {LOCKED}: {root / NAME} has {lacking}; {todo}")
    return {**raw, "dataset": dataset}


def _problems_on_disk(raw: Mapping[str, Any], root: Path) -> list[str]:
    """Problems beyond the schema: missing files, unknown op_types. Parts that break the schema are skipped."""
    dataset = _valid(Dataset, raw.get("dataset"))
    selection = _valid(ConfigSelection, raw.get("selection", {}))
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


def _unusable_models(models: object, root: Path) -> list[str]:
    """Problems of models whose config.json is missing, or whose name is not bundled."""
    problems = []
    for index, value in enumerate(models if isinstance(models, list) else []):
        choice = _valid(ModelChoice, value)
        if choice is None:
            continue
        if choice.config is not None and not (root / choice.config).is_file():
            problems.append(f"models.{index}.config: {root / choice.config} does not exist")
        if choice.config is None and catalogue.slug_of(str(choice.name)) not in catalogue.entries():
            hint = catalogue.suggestion(str(choice.name))
            problems.append(f"models.{index}.name: {choice.name!r} is not bundled, so give its config; {hint}")
    return problems


def _valid(model: type[Model], value: object) -> Model | None:
    try:
        return model.model_validate(value)
    except ValidationError:
        return None


def _unknown_op_types(selection: ConfigSelection, path: Path | None) -> list[str]:
    """Problems with unknown op_types in the selection; without a dataset's folder, planning checks them."""
    known = set(registry.known())
    if path is None or known.issuperset(selection.op_types):
        return []
    known |= read_tree(path, naming=selection.op_types).op_types
    problems = []
    for name in (name for name in selection.op_types if name not in known):
        close = get_close_matches(name, known, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        problems.append(f"selection.op_type: {name!r} is not an op_type; {meant}known: {', '.join(sorted(known))}")
    return problems


def _explain(error: Mapping[str, Any]) -> str:
    """A pydantic error as one line: place, value and what was expected."""
    location = [str(part) for part in error["loc"]]
    where = ".".join(location) or "the file"
    value = repr(error["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."  # a long mapping would hide the message
    match error["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key; {_known_keys(location)}"
        case "missing":
            return f"{where}: missing"
        case "value_error":
            return f"{where}: {error['msg'].removeprefix('Value error, ')}"
        case "string_pattern_mismatch":
            return f"{where}: {shown} does not have the form {error['ctx']['pattern']}"
        case _:
            said = of_files(error["msg"])
            return f"{where}: {shown}: {said[0].lower()}{said[1:]}"


def _known_keys(location: list[str]) -> str:
    """Text that lists the keys allowed at an unknown key's place, the closest first."""
    model: type[BaseModel] = Config
    for part in location[:-1]:
        if part.isdigit():  # an item of a list
            continue
        annotation = model.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel))
    close = get_close_matches(location[-1], model.model_fields, n=1)
    known = f"known: {', '.join(model.model_fields)}"
    return f"did you mean {close[0]!r}? {known}" if close else known


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; mappings are merged key by key, as by Snakemake."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def config_of(root: Path, changes: Mapping[str, Any]) -> Config:
    """The configuration of one run. Raises TraceproofError: the file can not be read or used."""
    try:
        raw = YAML(typ="safe").load((root / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise TraceproofError("config.yaml cannot be used", problems=[str(error)]) from error
    if not isinstance(raw, dict):
        raise TraceproofError("config.yaml cannot be used", problems=["the file: it must be a mapping of keys"])
    source = "config.yaml with these options" if changes else "config.yaml"
    return read_config(merged(raw, changes), root=root, source=source)


def repeat_options(config: Config, root: Path) -> str:
    """Command-line options for repeating a case: settings of a run that differ from config.yaml."""
    try:
        written = config_of(root, {})
    except TraceproofError:  # the run used another file
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
            parts += ["--tolerance", str(value)]
        else:
            overrides.append(f"{key}={json.dumps(value)}")
    return shlex.join([*parts, *(["--", "--config", *overrides] if overrides else [])])
