"""A kernel definition, as the flashinfer-trace dataset writes it.

Source: flashinfer_trace/definition.md of the public dataset. The model is strict: a key it does not know is
an error, so that nothing is lost silently on a round trip. Definitions of other dialects are turned into it by
`traceproof.dataset.dialects`; what only they may say is refused elsewhere.
"""

import ast
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
LARGEST = 1 << 40  # of an axis: a tensor of so many elements fits nowhere
MOST = 256  # axes, inputs, outputs, tags or constraints of one definition
MOST_DIMENSIONS = 64  # PyTorch's operators take no more
FUNCTION = "fi_api:"  # tag: the function that a definition is of


class Dialect(StrEnum):
    """In which form a definition's file was written."""

    PUBLISHED = "published"  # definition.md of the public dataset
    TRACE_DUMP = "flashinfer_trace_dump"  # what FlashInfer writes under FLASHINFER_TRACE_DUMP


class DType(StrEnum):
    """Element types; the published schema allows PUBLISHED_DTYPES alone."""

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
    STRING = "string"  # of a scalar: a mode, a device, a dtype
    UNKNOWN = "unknown"  # of an output: whatever the code gives

    @property
    def bits(self) -> int:
        """Size of one element in bits; float4 counts 4, two to a byte."""
        digits = re.search(r"\d+", self)  # those that follow the kind of number
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
    """An axis whose size the inputs decide; `parent` names the axis it is nested in."""

    model_config = STRICT
    type: Literal["var"]
    parent: Identifier | None = None
    description: str | None = None


Axis = Annotated[ConstAxis | VarAxis, Field(discriminator="type")]


class TensorSpec(BaseModel):
    """Shape (axis names; empty: 0-d tensor; null: Python scalar), dtype, and whether it may be None."""

    model_config = STRICT
    shape: Annotated[tuple[Identifier, ...] | None, Field(strict=False, max_length=MOST_DIMENSIONS)]
    dtype: Annotated[DType, Field(strict=False)]
    description: str | None = None
    optional: bool = False
    param: Plain | None = None  # of an output: the parameter of the API that it is written to


class Definition(BaseModel):
    """A kernel: its axes, its inputs in call order, its outputs in return order, and a reference."""

    model_config = STRICT
    name: Name
    op_type: OpType
    description: str | None = None
    tags: Annotated[tuple[Plain, ...], Field(strict=False, max_length=MOST)] = ()
    axes: Annotated[dict[Identifier, Axis], Field(max_length=MOST)]
    constraints: Annotated[tuple[NonEmpty, ...] | None, Field(strict=False, max_length=MOST)] = None
    inputs: Annotated[dict[Identifier, TensorSpec], Field(max_length=MOST)]
    outputs: Annotated[dict[Identifier, TensorSpec], Field(max_length=MOST)]
    reference: str  # source with a function `run`; empty: a dialect other than the published one gave none
    dialect: Annotated[Dialect, Field(strict=False)] = Dialect.PUBLISHED  # what its file was written in
    # source with a function `init_entry` that makes inputs; only dialects other than the published one
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
        """What the published schema does not have; `specs` are all inputs and outputs."""
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
        """What of the reference and the constraints is no Python."""
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
        """Shape of a tensor for such `axes`; None: a Python scalar. Raises KeyError: an axis has no value."""
        if spec.shape is None:
            return None
        const = self.const_axes
        return tuple(const[name] if name in const else axes[name] for name in spec.shape)

    @property
    def dumped_from(self) -> str:
        """The function that a trace dump's tag names; empty: none, or it is no dump."""
        named = (tag.removeprefix(FUNCTION) for tag in self.tags if tag.startswith(FUNCTION))
        return next(named, "") if self.dialect is Dialect.TRACE_DUMP else ""

    @property
    def in_place(self) -> frozenset[str]:
        """Inputs that an output says it is written to."""
        params = {spec.param for spec in self.outputs.values()}
        return frozenset(name for name in self.inputs if name in params)

    @cached_property
    def open_axes(self) -> frozenset[str]:
        """Var axes of outputs alone, which only a dialect other than the published one may leave to the code."""
        given = {axis for spec in self.inputs.values() for axis in spec.shape or ()}
        tied = {word for text in self.constraints or () for word in re.findall(r"\w+", text)}
        free = self.dialect is not Dialect.PUBLISHED
        return frozenset(name for name in self.var_axes if free and name not in given | tied)

    @property
    def constants(self) -> Constants:
        """Constants that decide its numbers and are no input, with all that state them."""
        return constants_of(self)

    @cached_property
    def digest(self) -> str:
        """Digest of all that decides a verdict: of descriptions and tags, only the constants that they state."""
        meaning = {key: value for key, value in self.as_json().items() if key not in {"description", "tags"}}
        for group in ("axes", "inputs", "outputs"):
            for entry in meaning[group].values():
                entry.pop("description", None)
            meaning[group] = list(meaning[group].items())
        if self.constants.entries:
            meaning["constants"] = self.constants.as_json()
        return digest_json(meaning)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other fields; its digest and what else follows from fields is computed anew."""
        copy = super().model_copy(update=update, deep=deep)
        for name in vars(copy).keys() - type(self).model_fields.keys():
            del vars(copy)[name]
        return copy

    def as_json(self) -> dict[str, Any]:
        """The JSON object that the file held: only keys that were given, in the schema's order.

        `constraints: null` says what leaving the key out says, and only that form is read everywhere.
        """
        value = self.model_dump(mode="json", exclude_unset=True)
        if self.constraints is None:
            value.pop("constraints", None)
        return value
