"""Putting a definition of a kernel call together: axes, tensors, tags, reference, in the dataset's shape."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from string import Template
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.stacks import PACKAGES, TAGGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A definition before it knows its models."""

    name: str
    description: str
    axes: dict[str, dict[str, Any]]
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    op_type: str
    reference: str
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
    scaled_down: "Draft | None" = field(default=None, repr=False)

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


def draft(
    op_type: str,
    skeleton: str,
    values: Mapping[str, object],
    *,
    without: Collection[str] = (),
    scaled_down: Draft | None = None,
) -> Draft:
    """The definition of an op_type that `<skeleton>.toml.in` and `<skeleton>.py.in` of `templates` state.

    `$NAME` in them is a value; axes and inputs in `without` are left out. Such texts are ours, written from the
    definitions' semantics; `traceproof.extract.merge` holds every reference against the op's float64 oracle.
    Raises KeyError: a placeholder has no value.
    """
    stated = tomllib.loads(_text(f"{skeleton}.toml.in", values))
    reference = _text(f"{stated.pop('reference', skeleton)}.py.in", values)
    stated["axes"] = {name: _axis(said) for name, said in stated["axes"].items() if name not in without}
    for part in ("inputs", "outputs"):
        stated[part] = {name: _tensor(*said) for name, said in stated[part].items() if name not in without}
    return Draft(op_type=op_type, reference=reference, scaled_down=scaled_down, **stated)


def _text(name: str, values: Mapping[str, object]) -> str:
    text = resources.files("traceproof.ops").joinpath("templates", name).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _axis(said: str | list[Any]) -> dict[str, Any]:
    """An axis that the inputs decide, of its description; of a size and a description, one of that size."""
    if isinstance(said, str):
        return {"type": "var", "description": said}
    return {"type": "const", "value": said[0], "description": said[1]}


def _tensor(shape: str, dtype: str, description: str, *optional: str) -> dict[str, Any]:
    """A tensor whose axes are the words of `shape`; a Python number where that is `scalar`."""
    axes = None if shape == "scalar" else shape.split()
    spec: dict[str, Any] = {"shape": axes, "dtype": dtype, "description": description}
    return spec | {"optional": True} if optional else spec
