"""config.yaml: a closed schema, read once into a frozen object; nobody reads the raw mapping after that."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from traceproof.actors.registry import TRUTHS
from traceproof.errors import TraceproofError
from traceproof.extract import catalogue
from traceproof.ops import registry
from traceproof.ops.cases import SIZES

Model = TypeVar("Model", bound=BaseModel)
CLOSED = ConfigDict(extra="forbid", frozen=True)
Text = Annotated[str, StringConstraints(min_length=1)]
Names = tuple[Text, ...]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Ranks of a parallelism: a number alone is short for a list of one.
Ranks = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else (value,)),
]


class Pypi(BaseModel):
    """A folder inside a released sdist; pip fetches it from whatever index the user's pip is set up for."""

    model_config = CLOSED
    package: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, StringConstraints(pattern=r"^[0-9][A-Za-z0-9.+!_-]*$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    folder: Text = "."


class Git(BaseModel):
    """A folder of a git repository at one commit; any URL that git understands, with git's own credentials."""

    model_config = CLOSED
    url: Text
    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
    folder: Text = "."

    @field_validator("url")
    @classmethod
    def _no_option(cls, url: str) -> str:
        if url.startswith("-"):  # git would take it for an option
            raise ValueError("is not a URL")
        return url


class Dataset(BaseModel):
    """Where the definitions come from: exactly one of the three; null counts as not given."""

    model_config = CLOSED
    pypi: Pypi | None = None
    git: Git | None = None
    path: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("pypi", "git", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(repr(name) for name in given) or "none"
            raise ValueError(f"give exactly one of 'pypi', 'git' and 'path', not {found}")
        return self


class Selection(BaseModel):
    """Which definitions are verified, and which of their cases; an empty list selects all."""

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


class Stack(BaseModel):
    """An environment: built here from envs/, unless `python` names an interpreter that has it already."""

    model_config = CLOSED
    python: Text | None = None


class TorchStack(Stack):
    """The stack of planning, references, oracles and judging; `auto` takes CUDA where the machine has it."""

    env: Literal["auto", "cpu", "cuda"] = "auto"


class TruthStack(Stack):
    """The stack of a ground truth; `source` takes its package from a checkout: `locked`, or a folder."""

    source: Text | None = None


class Stacks(BaseModel):
    """The stacks by name."""

    model_config = CLOSED
    torch: TorchStack = TorchStack()
    flashinfer: TruthStack = TruthStack()
    sglang: TruthStack = TruthStack()
    fla: TruthStack = TruthStack()
    extract: Stack = Stack()


class Limits(BaseModel):
    """What one case, or one build, may use; past it the case gets an `error` (or, by estimate, a skip)."""

    model_config = CLOSED
    wall_s: Positive = 120.0
    memory_gb: Positive = 10.0
    output_mb: Positive = 1.0
    build_s: Positive = 900.0


class ModelChoice(BaseModel):
    """A model whose definitions are extracted first; a name alone is short for `name`."""

    model_config = CLOSED
    name: Text | None = None
    config: Path | None = None
    tp: Ranks = ()
    ep: Ranks = ()

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.name is None and self.config is None:
            raise ValueError("give the 'name' of a bundled model, or the path of a config.json as 'config'")
        return self


class Config(BaseModel):
    """The whole file; see config.yaml for what each key means."""

    model_config = CLOSED
    dataset: Dataset
    models: tuple[ModelChoice, ...] = ()
    selection: Selection = Selection()
    test_sizes: Annotated[tuple[Literal["small", "medium", "large"], ...], Field(min_length=1)] = (
        "small",
        "medium",
    )
    workloads: Literal["auto"] | bool = "auto"
    truths: Names = tuple(TRUTHS)
    tolerance: Annotated[float, Field(ge=0)] | None = None
    force: bool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    stacks: Stacks = Stacks()
    limits: Limits = Limits()
    known: Path | None = None
    results: Path = Path("results")
    run: Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*)?$")] = ""

    @field_validator("tolerance")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @field_validator("truths")
    @classmethod
    def _known_truths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name not in TRUTHS]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no ground truth; known: {', '.join(TRUTHS)}")
        return tuple(name for name in TRUTHS if name in value)

    @field_validator("test_sizes")
    @classmethod
    def _in_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(size for size in SIZES if size in value)  # the order and repeats mean nothing


def read_config(raw: Mapping[str, Any], *, root: Path, source: str = "config.yaml") -> Config:
    """Check a mapping (config.yaml, overrides already merged in) and freeze it.

    Args:
        raw: what YAML gave.
        root: the folder that relative paths in it start from.
        source: how errors call it.

    Raises:
        TraceproofError: every problem at once.
    """
    problems: list[str] = []
    config: Config | None = None
    raw = _without_null_text(raw)
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
    path = None if dataset is None or dataset.path is None else root / dataset.path
    if path is not None and not path.is_dir():
        problems.append(f"dataset.path: {path} is not a folder")
    elif path is not None and next((path / "definitions").rglob("*.json"), None) is None:
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
            bundled = ", ".join(catalogue.entries())
            problems.append(
                f"models.{index}.name: {choice.name!r} is not bundled, so give its config; bundled: {bundled}"
            )
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
    folders = {folder.name for folder in (path / "definitions").iterdir() if folder.is_dir()}
    accepted = folders | set(registry.known())
    return [_not_an_op_type(name, folders) for name in selection.op_types if name not in accepted]


def _not_an_op_type(name: str, folders: set[str]) -> str:
    return (
        f"selection.op_type: {name!r} is not an op_type; known: {', '.join(sorted({*registry.known(), *folders}))}"
    )


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
