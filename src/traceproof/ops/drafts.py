"""Putting a definition of a kernel call together: axes, tensors, tags, reference, in the dataset's shape."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from string import Template
from typing import Any, NamedTuple

from traceproof.dataset.definition import Definition
from traceproof.stacks import PACKAGES, TAGGED

Axes = dict[str, dict[str, Any]]
Tensors = dict[str, dict[str, Any]]
COMMON = "traceproof.ops.common"  # holds skeletons that several op_types have


def const(value: int, description: str) -> dict[str, Any]:
    """An axis of a fixed size."""
    return {"type": "const", "value": value, "description": description}


def var(description: str) -> dict[str, Any]:
    """An axis that the inputs decide."""
    return {"type": "var", "description": description}


def tensor(shape: str, dtype: str, description: str, *, optional: bool = False) -> dict[str, Any]:
    """A tensor whose axes are the words of `shape`."""
    spec: dict[str, Any] = {"shape": shape.split(), "dtype": dtype, "description": description}
    return spec | {"optional": True} if optional else spec


def scalar(dtype: str, description: str) -> dict[str, Any]:
    """A Python number."""
    return {"shape": None, "dtype": dtype, "description": description}


class Filled(NamedTuple):
    """A reference's text out of an op_type's skeleton."""

    op_type: str
    reference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A definition before it knows its models."""

    name: str
    description: str
    axes: Axes
    inputs: Tensors
    outputs: Tensors
    filled: Filled  # its reference, and the op_type whose package that is of
    constraints: Sequence[str] = ()
    stage: str | None = None
    fi_api: str | None = None
    quantisation: str | None = None
    extra_tags: Sequence[str] = ()
    # tp, ep: whether the parallelism is part of what it describes
    tp: bool = False
    ep: bool = False
    # a definition of the same form with small const axes, to check the reference by where the real sizes would not
    # fit a few seconds or a gigabyte; None: check the definition itself
    twin: "Draft | None" = field(default=None, repr=False)

    @property
    def op_type(self) -> str:
        """The definition's op_type."""
        return self.filled.op_type

    @property
    def reference(self) -> str:
        """The reference's text."""
        return self.filled.reference

    def definition(self, tags: Sequence[str]) -> Definition:
        """The definition with `tags`, checked by the strict model of the schema."""
        content: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "op_type": self.op_type,
            "tags": list(tags),
            "axes": self.axes,
            "constraints": list(self.constraints),
            "inputs": self.inputs,
            "outputs": self.outputs,
            "reference": self.reference,
        }
        if not self.constraints:
            del content["constraints"]
        return Definition.model_validate(content)

    def tags(self, models: Sequence[str], *, tp: int, ep: int, dp: int = 1) -> list[str]:
        """Tags in the dataset's order: stage, status, models, and what else applies."""
        found = [f"stage:{self.stage}"] if self.stage else []
        found += ["status:draft", *(f"model:{model}" for model in models)]
        found += [f"quantization:{self.quantisation}"] if self.quantisation else []
        found += [f"fi_api:{PACKAGES[TAGGED]}.{self.fi_api}"] if self.fi_api else []
        found += [f"tp:{tp}"] if self.tp else []
        found += [f"ep:{ep}"] if self.ep else []
        found += [f"dp:{dp}"] if self.tp and dp > 1 else []
        return [*found, *self.extra_tags]


def fill(package: str | None, skeleton: str, **constants: float | str) -> Filled:
    """The reference text `<skeleton>.py.in` of an op_type's package or of all, its placeholders `$NAME` replaced.

    Such texts are ours, written from the definitions' semantics; `traceproof.extract.check` holds every filled one
    against the op's float64 oracle.

    Raises:
        KeyError: a placeholder has no constant.
    """
    assert package is not None
    places = [resources.files(place).joinpath(f"{skeleton}.py.in") for place in (package, COMMON)]
    text = next(place for place in places if place.is_file()).read_text(encoding="utf-8")
    return Filled(package.rpartition(".")[2], Template(text).substitute(constants))
