"""A workload: concrete axes of a definition and where each input's data comes from.

Source: flashinfer_trace/trace.md of the public dataset and flashinfer_bench.data 0.1.2. Neither has a key for a
tolerance or custom inputs; SOL-ExecBench's lines do.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from traceproof.dataset.definition import LARGEST, MOST, STRICT
from traceproof.names import Identifier, Name, Plain

Number = int | float  # strict: true and "1" are no numbers; 1 and 1.0 stay what they were
Limit = Annotated[Number, Field(ge=0, allow_inf_nan=False)]


class Record(BaseModel):
    """A JSON object of the schema: closed, frozen, and written as it was read."""

    model_config = STRICT

    def as_json(self) -> dict[str, Any]:
        """The JSON object that the file held: only keys that were given, in the schema's order."""
        return self.model_dump(mode="json", exclude_unset=True)


class RandomInput(Record):
    """An input whose values do not matter: drawn by whoever runs the workload."""

    type: Literal["random"]


class ScalarInput(Record):
    """A Python scalar, given in place."""

    type: Literal["scalar"]
    value: bool | int | Annotated[float, Field(allow_inf_nan=False)]


class SafetensorsInput(Record):
    """A tensor of a safetensors file; `path` is relative to the dataset's root (or a URI)."""

    type: Literal["safetensors"]
    path: Plain
    tensor_key: Plain


class CustomInput(Record):
    """An input that the definition's own code makes (SOL-ExecBench)."""

    type: Literal["custom"]


class Tolerance(Record):
    """How far SOL-ExecBench lets an output be off; kept, and decides no verdict."""

    max_atol: Limit | None = None
    max_rtol: Limit | None = None
    # share of the elements that must lie within `max_atol` and `max_rtol`
    required_matched_ratio: Limit | None = None
    max_error_cap: Limit | None = None  # of any element
    allow_negative_inf: bool | None = None  # whether an output may be -inf


InputData = Annotated[RandomInput | ScalarInput | SafetensorsInput | CustomInput, Field(discriminator="type")]


class Workload(Record):
    """Sizes of the var axes and a source for each input."""

    uuid: Name
    axes: Annotated[dict[Identifier, Annotated[int, Field(ge=0, le=LARGEST)]], Field(max_length=MOST)]
    inputs: Annotated[dict[Identifier, InputData], Field(max_length=MOST)]
    tolerance: Tolerance | None = None

    @property
    def blobs(self) -> tuple[str, ...]:
        """Paths of the safetensors files that the inputs name, without repeats, in order."""
        paths = [data.path for data in self.inputs.values() if isinstance(data, SafetensorsInput)]
        return tuple(dict.fromkeys(paths))
