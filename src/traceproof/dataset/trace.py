"""A trace: one line of workloads/ (solution and evaluation are null) or of traces/ (both are there).

Source: flashinfer_trace/trace.md of the public dataset and flashinfer_bench.data 0.1.2.
"""

import math
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from traceproof.dataset.definition import NonEmpty
from traceproof.dataset.workload import Number, Record, Workload
from traceproof.names import Name


def _not_negative(value: Number | str) -> Number | str:
    if isinstance(value, str) or math.isnan(value) or value >= 0:
        return value
    raise ValueError("must not be negative")


Error = Annotated[Number | Literal["NaN", "Infinity"], AfterValidator(_not_negative)]
"""An error figure; flashinfer-bench writes what JSON can not say as these two words."""
NonNegative = Annotated[Number, Field(ge=0)]


class Status(StrEnum):
    """How an evaluation ended."""

    PASSED = "PASSED"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    TIMEOUT = "TIMEOUT"  # not in trace.md, but flashinfer-bench 0.1.2 writes it


class Correctness(Record):
    """Largest errors over all outputs; `extra` is free."""

    max_relative_error: Error = 0.0
    max_absolute_error: Error = 0.0
    extra: dict[str, Any] | None = None


class Performance(Record):
    """Mean times of the solution and of the reference, in milliseconds, and their ratio."""

    latency_ms: NonNegative = 0.0
    reference_latency_ms: NonNegative = 0.0
    speedup_factor: NonNegative = 0.0


class Environment(Record):
    """Where the evaluation ran: hardware name, library versions."""

    hardware: NonEmpty
    libs: dict[str, str] = Field(default_factory=dict)


class Evaluation(Record):
    """One benchmark result; correctness and performance are there exactly where the status has them."""

    status: Annotated[Status, Field(strict=False)]
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None
    environment: Environment
    timestamp: NonEmpty

    @model_validator(mode="after")
    def _check(self) -> Self:
        wanted = {
            "correctness": self.status in {Status.PASSED, Status.INCORRECT_NUMERICAL},
            "performance": self.status is Status.PASSED,
        }
        for key, needed in wanted.items():
            if (getattr(self, key) is not None) != needed:
                raise ValueError(f"status {self.status} {'needs' if needed else 'has no'} {key}")
        return self


class Trace(Record):
    """A workload of a definition and, unless it is a workload line, what a solution made of it."""

    definition: Name
    solution: Name | None = None
    workload: Workload
    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.solution is None) != (self.evaluation is None):
            raise ValueError("solution and evaluation must both be there (a trace) or both be null (a workload)")
        return self

    @property
    def is_workload(self) -> bool:
        """Whether the line only describes a workload."""
        return self.solution is None
