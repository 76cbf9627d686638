"""config.yaml: a closed schema, read once into a frozen object; nobody reads the raw mapping after that."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    create_model,
    field_validator,
    model_validator,
)

from traceproof.dataset.fetch import CLOSED, Dataset, Short, Text
from traceproof.judge.kernel_properties import DEMANDED, PROPERTIES
from traceproof.ops.cases import ALL_SIZES
from traceproof.stacks import STACKS, TRUTHS, Stack

if TYPE_CHECKING:
    from traceproof import sandbox

Names = tuple[Text, ...]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Ranks of a parallelism: a number alone is short for a list of one.
Ranks = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else (value,)),
]

# Whether jobs find a GPU, or its model; `--config gpu=true` gives a text.
Gpu = Annotated[
    Literal["auto"] | bool | Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]+$")],
    BeforeValidator(
        lambda value: {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
    ),
]


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


class StackSettings(BaseModel):
    """An environment; of the keys, a stack has those that its record has a use for.

    Attributes:
        python: an interpreter that has the packages already; None: it is built here from envs/.
        env: `auto` takes CUDA where the machine has it.
        source: takes the stack's package from a checkout: `locked`, or a folder.
        cuda_home: the machine's CUDA toolkit to compile kernels with; None: the pins' wheels.
    """

    model_config = CLOSED
    python: Text | None = None

    def get(self, key: Literal["env", "source", "cuda_home"]) -> str | None:
        """What a key that not every stack has is set to; None: nothing, or the stack has no such key."""
        found: str | None = getattr(self, key, None)
        return found


class StackTable(BaseModel):
    """The stacks by name; `Stacks` has a field for each that there is."""

    model_config = CLOSED

    def __getitem__(self, name: str) -> StackSettings:
        found: StackSettings = getattr(self, name)
        return found


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


class Limits(BaseModel):
    """What one case, or one build, may use; past it the case gets an `error` (or, by estimate, a skip)."""

    model_config = CLOSED
    wall_s: Positive = 120.0
    memory_gb: Positive = 10.0
    output_mb: Positive = 1.0
    build_s: Positive = 900.0

    def of_call(self, *, cases: int = 1) -> "sandbox.Limits":
        """As the sandbox takes them; a call that runs several cases may take longer."""
        from traceproof import sandbox  # all of it, which few who read a configuration need

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
    """How solutions are judged beyond right answers."""

    model_config = CLOSED
    demanded: Names = DEMANDED

    @field_validator("demanded")
    @classmethod
    def _known_properties(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _among(value, PROPERTIES, "property of kernels")


class ModelChoice(Short):
    """A model whose definitions are extracted first; a name alone is short for `name`."""

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
    """The whole file; see config.yaml for what each key means."""

    model_config = CLOSED
    dataset: Dataset
    models: tuple[ModelChoice, ...] = ()
    selection: Selection = Selection()
    test_sizes: Annotated[tuple[Literal["small", "medium", "large", "stress"], ...], Field(min_length=1)] = (
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
    solutions: Solutions = Solutions()
    hidden_seed: Annotated[int, Field(ge=0, lt=1 << 48)] | None = None
    allow_weak_isolation: bool = False
    known: Path | None = None
    results: Path = Path("results")
    gpu: Gpu = "auto"
    run: Annotated[
        str, StringConstraints(pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*)?$")
    ] = ""

    @field_validator("tolerance")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

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
        return tuple(size for size in ALL_SIZES if size in value)  # the order and repeats mean nothing
