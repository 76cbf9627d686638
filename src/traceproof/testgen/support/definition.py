"""A kernel definition, read from its JSON file. The schema's checks are `traceproof lint`'s."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

BITS: Mapping[str, int] = MappingProxyType({"bfloat16": 16, "bool": 8})  # where the name ends in no number of bits


class DType(StrEnum):
    """Element types that the schema allows."""

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

    @property
    def bits(self) -> int:
        """Size of one element in bits; float4 counts 4, two to a byte."""
        return BITS.get(self.value) or int("".join(filter(str.isdigit, self.value.partition("_")[0])))


@dataclass(frozen=True)
class TensorSpec:
    """Shape (axis names; empty: 0-d tensor; None: Python scalar), dtype, and whether None may be passed."""

    shape: tuple[str, ...] | None
    dtype: DType
    optional: bool = False


@dataclass(frozen=True)
class Definition:
    """A kernel: its axes, its inputs in call order, its outputs in return order, and a reference."""

    name: str
    op_type: str
    axes: Mapping[str, Mapping[str, Any]]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    reference: str
    constraints: tuple[str, ...] | None = None
    tags: tuple[str, ...] = field(default=())

    @cached_property
    def const_axes(self) -> Mapping[str, int]:
        """Sizes of the const axes."""
        const = {name: axis["value"] for name, axis in self.axes.items() if axis["type"] == "const"}
        return MappingProxyType(const)

    @cached_property
    def var_axes(self) -> tuple[str, ...]:
        """Names of the var axes, in order."""
        return tuple(name for name, axis in self.axes.items() if axis["type"] == "var")

    def shape_of(self, spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...] | None:
        """Shape of a tensor with the var axes bound as in `axes`; None for a Python scalar."""
        if spec.shape is None:
            return None
        return tuple(self.const_axes[name] if name in self.const_axes else axes[name] for name in spec.shape)


def read_definition(path: Path) -> Definition:
    """Read a definition's file.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not there, no JSON, or no definition.
    """
    value = json.loads(path.read_text(encoding="utf-8"))
    return Definition(
        name=value["name"],
        op_type=value["op_type"],
        axes=value["axes"],
        inputs=_specs(value["inputs"]),
        outputs=_specs(value["outputs"]),
        reference=value["reference"],
        constraints=tuple(value.get("constraints") or ()) or None,
        tags=tuple(value.get("tags") or ()),
    )


def _specs(given: Mapping[str, Any]) -> dict[str, TensorSpec]:
    specs = {}
    for name, spec in given.items():
        shape = spec["shape"]
        axes = None if shape is None else tuple(shape)
        specs[name] = TensorSpec(axes, DType(spec["dtype"]), bool(spec.get("optional", False)))
    return specs
