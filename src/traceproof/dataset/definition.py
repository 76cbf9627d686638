"""A kernel definition, in the schema of the flashinfer-trace dataset.

Source: flashinfer_trace/definition.md of the public dataset. The model is strict: an unknown key is an error, so
that nothing is lost silently on a round trip. `traceproof.dataset.dialects` turns other dialects into it; what
only they may say is refused in published ones.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from traceproof.dataset.constants import Constants, constants_of
from traceproof.digests import digest_json
from traceproof.files import parse_quietly
from traceproof.names import Identifier, Name, OpType, Plain

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
LARGEST = 1 << 40  # largest size of an axis: no memory holds a tensor of so many elements
MOST = 256  # axes, inputs, outputs, tags or constraints of one definition
MOST_DIMENSIONS = 64  # PyTorch's operators take no more
FUNCTION = "fi_api:"  # prefix of a tag that names the function a definition is of


class Dialect(StrEnum):
    """The form in which a definition's file was written."""

    PUBLISHED = "published"  # definition.md of the public dataset
    TRACE_DUMP = "flashinfer_trace_dump"  # what FlashInfer writes under FLASHINFER_TRACE_DUMP


class DType(StrEnum):
    """Element types; the published schema has PUBLISHED_DTYPES only."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT4_E2M1 = "float4_e2m1"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    BOOL = "bool"
    FLOAT64 = "float64"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    STRING = "string"  # of a scalar: a mode, a device or a dtype
    UNKNOWN = "unknown"  # of an output: whatever the code returns

    @cached_property
    def bits(self) -> int:
        """Bits per element; float4 has 4, so two in a byte."""
        digits = re.search(r"\d+", self)  # the first number in its name
        return int(digits[0]) if digits else OTHER_BITS[self.value]


OTHER_BITS = {"bool": 8, "string": 0, "unknown": 64}
PUBLISHED_DTYPES = frozenset(list(DType)[: list(DType).index(DType.FLOAT64)])


class ConstAxis(BaseModel):
    """An axis whose size the definition fixes."""

    model_config = STRICT
    type: Literal["const"]
    value: Annotated[int, Field(ge=0, le=LARGEST)]
    description: str | None = None


class VarAxis(BaseModel):
    """An axis whose size depends on the inputs; `parent` names the axis that it is nested in."""

    model_config = STRICT
    type: Literal["var"]
    parent: Identifier | None = None
    description: str | None = None


Axis = Annotated[ConstAxis | VarAxis, Field(discriminator="type")]


class TensorSpec(BaseModel):
    """Shape (axis names; (): 0-d tensor; None: Python scalar) and dtype of an input or output."""

    model_config = STRICT
    shape: Annotated[tuple[Identifier, ...] | None, Field(strict=False, max_length=MOST_DIMENSIONS)]
    dtype: Annotated[DType, Field(strict=False)]
    description: str | None = None
    optional: bool = False
    param: Plain | None = None  # of an output: the API's parameter to which it is written


class Definition(BaseModel):
    """A kernel: axes, inputs in call order, outputs in return order, and a reference."""

    model_config = STRICT
    name: Name
    op_type: OpType
    description: str | None = None
    tags: Annotated[tuple[Plain, ...], Field(strict=False, max_length=MOST)] = ()
    axes: Annotated[dict[Identifier, Axis], Field(max_length=MOST)]
    constraints: Annotated[tuple[NonEmpty, ...] | None, Field(strict=False, max_length=MOST)] = None
    inputs: Annotated[dict[Identifier, TensorSpec], Field(max_length=MOST)]
    outputs: Annotated[dict[Identifier, TensorSpec], Field(max_length=MOST)]
    reference: str  # Python source with a function `run`; empty: a trace dump had none
    dialect: Annotated[Dialect, Field(strict=False)] = Dialect.PUBLISHED  # of its file
    # Python source with a function `init_entry` that makes inputs; not in the published dialect
    init: NonEmpty | None = None
    init_entry: Identifier | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        specs = {f"inputs.{name}": spec for name, spec in self.inputs.items()}
        specs |= {f"outputs.{name}": spec for name, spec in self.outputs.items()}
        for where, spec in specs.items():
            if unknown := [axis for axis in spec.shape or () if axis not in self.axes]:
                problems.append(f"{where}.shape names {unknown}, which axes does not define")
        for name, axis in self.axes.items():
            if isinstance(axis, VarAxis) and axis.parent is not None and axis.parent not in self.axes:
                problems.append(f"axes.{name}.parent names {axis.parent!r}, which axes does not define")
        problems += self._bad_code()
        shared = sorted(self.inputs.keys() & self.outputs.keys())
        if shared:
            problems.append(f"inputs and outputs share the names {shared}")
        if self.dialect is Dialect.PUBLISHED:
            problems += self._beyond_schema(specs)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _beyond_schema(self, specs: Mapping[str, TensorSpec]) -> Iterator[str]:
        """Problems with what the published schema does not have; `specs` are all inputs and outputs."""
        if not self.outputs:
            yield "outputs is empty"
        for where, spec in specs.items():
            if spec.dtype not in PUBLISHED_DTYPES:
                yield f"{where}.dtype is {str(spec.dtype)!r}, which the schema does not have"
            if spec.param is not None:
                yield f"{where}.param is no key of the schema"
        if not self.reference:
            yield "reference is empty"
        if self.init is not None or self.init_entry is not None:
            yield "init and init_entry are no keys of the schema"

    def _bad_code(self) -> Iterator[str]:
        """Problems with a reference or constraints that are no Python."""
        try:
            module = parse_quietly(self.reference)
            functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
            if self.reference and "run" not in functions:
                yield "reference has no top-level function named run"
        except (SyntaxError, ValueError) as error:
            yield f"reference is not Python: {error}"
        for constraint in self.constraints or ():
            try:
                ast.parse(constraint, mode="eval")
            except (SyntaxError, ValueError) as error:
                yield f"constraint {constraint!r} is not an expression: {error}"

    @cached_property
    def const_axes(self) -> Mapping[str, int]:
        """Sizes of the const axes."""
        sizes = {name: axis.value for name, axis in self.axes.items() if isinstance(axis, ConstAxis)}
        return MappingProxyType(sizes)

    @cached_property
    def var_axes(self) -> tuple[str, ...]:
        """Names of the var axes, in order."""
        return tuple(name for name, axis in self.axes.items() if isinstance(axis, VarAxis))

    def shape_of(self, spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...] | None:
        """Shape of a tensor, given sizes of var axes; None: a Python scalar. Raises KeyError: one is missing."""
        if spec.shape is None:
            return None
        const = self.const_axes
        return tuple(const[name] if name in const else axes[name] for name in spec.shape)

    def output_elements(self, axes: Mapping[str, int]) -> int:
        """Number of elements of all outputs, given sizes of var axes."""
        return sum(math.prod(self.shape_of(spec, axes) or ()) for spec in self.outputs.values())

    @property
    def dumped_from(self) -> str:
        """The FlashInfer function that a trace dump's tag names; empty: none, or it is no dump."""
        named = (tag.removeprefix(FUNCTION) for tag in self.tags if tag.startswith(FUNCTION))
        return next(named, "") if self.dialect is Dialect.TRACE_DUMP else ""

    @property
    def in_place(self) -> frozenset[str]:
        """Inputs to which an output is written, by its `param`."""
        params = {spec.param for spec in self.outputs.values()}
        return frozenset(name for name in self.inputs if name in params)

    @property
    def outputs_in_place(self) -> frozenset[str]:
        """Outputs that are inputs modified in place: they may share memory with these."""
        return frozenset(name for name, spec in self.outputs.items() if spec.param in self.inputs)

    @cached_property
    def open_axes(self) -> frozenset[str]:
        """Var axes that only outputs have and no constraint names, in trace dumps: the code decides on them."""
        of_inputs = {axis for spec in self.inputs.values() for axis in spec.shape or ()}
        tied = {word for text in self.constraints or () for word in re.findall(r"\w+", text)}
        free = self.dialect is not Dialect.PUBLISHED
        return frozenset(name for name in self.var_axes if free and name not in of_inputs | tied)

    @property
    def constants(self) -> Constants:
        """Constants that decide its numbers and are no input, with their sources."""
        return constants_of(self)

    @cached_property
    def digest(self) -> str:
        """Digest of all that decides a verdict; descriptions and tags count by the constants that they state."""
        meaning = {key: value for key, value in self.as_json().items() if key not in {"description", "tags"}}
        for group in ("axes", "inputs", "outputs"):
            for entry in meaning[group].values():
                entry.pop("description", None)
            meaning[group] = list(meaning[group].items())
        if self.constants.entries:
            meaning["constants"] = self.constants.as_json()
        return digest_json(meaning)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with changed fields; cached properties are computed again."""
        copy = super().model_copy(update=update, deep=deep)
        for name in vars(copy).keys() - type(self).model_fields.keys():
            del vars(copy)[name]
        return copy

    def as_json(self) -> dict[str, Any]:
        """The JSON object of the file: only keys that were given, in the schema's order.

        `constraints: null` is left out, which means the same and is the only form that all readers accept.
        """
        value = self.model_dump(mode="json", exclude_unset=True)
        if self.constraints is None:
            value.pop("constraints", None)
        return value
