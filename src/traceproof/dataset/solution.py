"""A solution: source code that implements a definition.

Source: flashinfer_trace/solution.md of the public dataset and flashinfer_bench.data 0.1.2.
"""

from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import Field, model_validator

from traceproof.dataset.definition import NonEmpty
from traceproof.dataset.workload import Record
from traceproof.names import Name

BASELINE = "baseline"  # author of the solutions that are published


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


class Binding(StrEnum):
    """How compiled code is bound to Python."""

    TVM_FFI = "tvm-ffi"
    TORCH = "torch"


class SourceFile(Record):
    """One file of the solution; `path` stays inside the folder where the solution is unpacked."""

    path: NonEmpty
    content: NonEmpty

    @model_validator(mode="after")
    def _check(self) -> Self:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"path {self.path!r} leaves the solution's folder")
        return self


class Build(Record):
    """How to build and call the solution; `entry_point` is `<file>::<function>`."""

    language: Annotated[Language, Field(strict=False)]
    target_hardware: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    entry_point: NonEmpty
    dependencies: Annotated[tuple[NonEmpty, ...], Field(strict=False)] = ()
    destination_passing_style: bool = True
    binding: Annotated[Binding | None, Field(strict=False)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.entry_point.count("::") != 1:
            raise ValueError(f"entry_point {self.entry_point!r} is not '<file>::<function>'")
        return self


class Solution(Record):
    """An implementation of the definition named `definition`."""

    name: Name
    definition: Name
    description: str | None = None
    author: Name
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
        """The path, among the sources, of the file that holds the function to call."""
        return self.spec.entry_point.partition("::")[0]

    @property
    def entry_function(self) -> str:
        """The name of the function to call."""
        return self.spec.entry_point.partition("::")[2]
