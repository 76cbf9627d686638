"""What a dataset holds beside definitions: workloads, traces and solutions.

A workload has sizes of axes and a source for each input; a trace is a line of workloads/ (solution and evaluation
are null) or of traces/; a solution is source code that implements a definition. Sources: flashinfer_trace/trace.md
and solution.md of the public dataset and flashinfer_bench.data 0.1.2.
"""

from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from traceproof.dataset.definition import LARGEST, MOST, STRICT, NonEmpty
from traceproof.names import Identifier, Name, Plain

Number = int | float  # strict: true and "1" are no numbers; int and float are kept apart


class StrictRecord(BaseModel):
    """A JSON object of the schema: no other keys, frozen, and written as it was read."""

    model_config = STRICT

    def as_json(self) -> dict[str, Any]:
        """The JSON object of the file: only keys that were given, in the schema's order."""
        return self.model_dump(mode="json", exclude_unset=True)


class RandomInput(StrictRecord):
    """An input with arbitrary values, drawn by the program that runs the workload."""

    type: Literal["random"]


class ScalarInput(StrictRecord):
    """A Python scalar, given in place."""

    type: Literal["scalar"]
    value: bool | int | Annotated[float, Field(allow_inf_nan=False)]


class SafetensorsInput(StrictRecord):
    """A tensor in a safetensors file; `path` is relative to the dataset's root, or a URI."""

    type: Literal["safetensors"]
    path: Plain
    tensor_key: Plain


InputData = Annotated[RandomInput | ScalarInput | SafetensorsInput, Field(discriminator="type")]


class Workload(StrictRecord):
    """Sizes of the var axes and a source for each input."""

    uuid: Name
    axes: Annotated[dict[Identifier, Annotated[int, Field(ge=0, le=LARGEST)]], Field(max_length=MOST)]
    inputs: Annotated[dict[Identifier, InputData], Field(max_length=MOST)]

    @property
    def blobs(self) -> tuple[str, ...]:
        """Paths of the safetensors files of its inputs, in order and without repeats."""
        paths = [data.path for data in self.inputs.values() if isinstance(data, SafetensorsInput)]
        return tuple(dict.fromkeys(paths))


NonNegative = Annotated[Number, Field(ge=0)]
Error = NonNegative | Literal["NaN", "Infinity"]
"""An error figure; flashinfer-bench writes what JSON can not say as these two words."""


# How an evaluation ended. TIMEOUT is not in trace.md, but flashinfer-bench 0.1.2 writes it.
EvaluationStatus = Literal[
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_NUMERICAL",
    "INCORRECT_DTYPE",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
]


class Correctness(StrictRecord):
    """Largest errors over all outputs; `extra` may hold anything."""

    max_relative_error: Error = 0.0
    max_absolute_error: Error = 0.0
    extra: dict[str, Any] | None = None


class Performance(StrictRecord):
    """Mean times of the solution and of the reference, in milliseconds, and their ratio."""

    latency_ms: NonNegative = 0.0
    reference_latency_ms: NonNegative = 0.0
    speedup_factor: NonNegative = 0.0


class EvaluationEnvironment(StrictRecord):
    """Where the evaluation ran: hardware name, library versions."""

    hardware: NonEmpty
    libs: dict[str, str] = Field(default_factory=dict)


class Evaluation(StrictRecord):
    """Result of one benchmark; the status decides whether it has correctness and performance."""

    status: EvaluationStatus
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None
    environment: EvaluationEnvironment
    timestamp: NonEmpty

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed_by_status = {
            "correctness": self.status in {"PASSED", "INCORRECT_NUMERICAL"},
            "performance": self.status == "PASSED",
        }
        for key, needed in needed_by_status.items():
            if (getattr(self, key) is not None) != needed:
                raise ValueError(f"status {self.status} {'needs' if needed else 'has no'} {key}")
        return self


class Trace(StrictRecord):
    """A workload of a definition and, except in workload lines, the result of a solution for it."""

    definition: Name
    solution: Plain | None = None
    workload: Workload
    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.solution is None) != (self.evaluation is None):
            raise ValueError("solution and evaluation must both be there (a trace) or both be null (a workload)")
        return self


BASELINE = "baseline"  # author of published solutions


class Language(StrEnum):
    """Languages that the schema allows."""

    PYTHON = "python"
    TRITON = "triton"
    CPP = "cpp"
    CUDA = "cuda"
    TILELANG = "tilelang"
    CUTLASS = "cutlass"
    CUTEDSL = "cutedsl"
    CUTILE = "cutile"


class SourceFile(StrictRecord):
    """One file of the solution; `path` stays inside the folder where the solution is unpacked."""

    path: NonEmpty
    content: NonEmpty

    @model_validator(mode="after")
    def _check(self) -> Self:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"path {self.path!r} leaves the solution's folder")
        return self


class Build(StrictRecord):
    """How to build and call a solution; `entry_point` is `<file>::<function>`."""

    language: Annotated[Language, Field(strict=False)]
    target_hardware: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    entry_point: NonEmpty
    dependencies: Annotated[tuple[NonEmpty, ...], Field(strict=False)] = ()
    destination_passing_style: bool = True
    binding: Literal["tvm-ffi", "torch"] | None = None  # how compiled code is bound to Python

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.entry_point.count("::") != 1:
            raise ValueError(f"entry_point {self.entry_point!r} is not '<file>::<function>'")
        return self


class Solution(StrictRecord):
    """An implementation of the definition named `definition`."""

    name: Plain
    definition: Name
    description: str | None = None
    author: Plain
    spec: Build
    sources: Annotated[tuple[SourceFile, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        paths = [source.path for source in self.sources]
        repeated = sorted({path for path in paths if paths.count(path) > 1})
        if repeated:
            raise ValueError(f"sources repeats the paths {repeated}")
        if self.entry_file not in paths:
            raise ValueError(f"entry_point names {self.entry_file!r}, which sources does not hold")
        return self

    @property
    def entry_file(self) -> str:
        """Path, among the sources, of the file with the function to call."""
        return self.spec.entry_point.partition("::")[0]
