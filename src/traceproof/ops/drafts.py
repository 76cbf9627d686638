"""Putting a definition of a kernel call together: axes, tensors, tags, reference, in the dataset's shape."""

import re
import textwrap
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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


WIDTH = 110  # of the arguments of a reference in one line
TENSOR = re.compile(r"(\w+)(?:\[([^\]]*)\])?(?::(\w+))?(\?)?")


def draft(
    op_type: str,
    skeleton: str,
    values: Mapping[str, object],
    *,
    without: Collection[str] = (),
    scaled_down: Draft | None = None,
) -> Draft:
    """The definition of an op_type that the table `skeleton` of a file in `templates` states.

    Such texts are ours, written from the definitions' semantics; `traceproof.extract.merge` holds every reference
    against the op's float64 oracle. `$NAME` in them is a value; inputs in `without` are left out. `inputs` and
    `outputs` are tensors with their axes, `:dtype` behind those that are not bfloat16, `?` behind optional ones,
    scalars bare. `sizes` are const axes, constants of the reference by their names in capitals; those of
    `unstated` are not, so that a scaled-down definition may have smaller ones. `says` and `run` are the
    reference's docstring and body, `head` stands before its functions; a function of the file is in it where it is
    called. What a table does not say is as in the one that it is `like`.
    Raises KeyError: a placeholder has no value, or a tensor or axis no description.
    """
    told = next(found for found in _files() if skeleton in found)

    def filled(said: Any) -> Any:  # noqa: ANN401 - TOML
        if isinstance(said, Mapping):
            return {name: filled(value) for name, value in said.items()}
        if isinstance(said, list):
            return [filled(value) for value in said]
        return Template(said).substitute(values).strip("\n") if isinstance(said, str) else said

    own = told[skeleton]
    stated: dict[str, Any] = {
        name: filled(said) for name, said in {**told[own.get("like", skeleton)], **own}.items()
    }
    described = told["described"] | stated.pop("described", {})
    constants, run = stated.pop("sizes", {}), stated.pop("run")
    sizes = constants | stated.pop("unstated", {})

    def tensors(part: str) -> dict[str, dict[str, Any]]:
        return {
            name: {"shape": axes.split() or None, "dtype": dtype or "bfloat16", "description": described[name]}
            | ({"optional": True} if optional else {})
            for name, axes, dtype, optional in TENSOR.findall(stated.pop(part))
            if name not in without
        }

    inputs, outputs = tensors("inputs"), tensors("outputs")
    used = [axis for spec in (*inputs.values(), *outputs.values()) for axis in spec["shape"] or ()]
    before = [f"{name.upper()} = {size}" for name, size in constants.items()] + [stated.pop("head", "")]
    functions = [filled(text) for name, text in told["functions"].items() if f"{name}(" in run]
    called = _function(inputs, constants, stated.pop("says"), run)
    imports = "import math\n\nimport torch" if "math." in "".join((run, *functions)) else "import torch"
    parts = ["\n\n".join(filter(None, (imports, "\n".join(before).strip("\n")))), *functions, called]
    stated.pop("like", None)
    return Draft(
        op_type=op_type,
        axes={axis: _axis(described[axis], sizes.get(axis)) for axis in dict.fromkeys([*used, *sizes])},
        inputs=inputs,
        outputs=outputs,
        reference="\n\n\n".join(parts) + "\n",
        scaled_down=scaled_down,
        **stated,
    )


@cache
def _files() -> list[dict[str, Any]]:
    folder = resources.files("traceproof.ops").joinpath("templates")
    return [tomllib.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir()]


def _axis(description: str, size: str | None) -> dict[str, Any]:
    """An axis that the inputs decide, or one of a size."""
    own = {"type": "var"} if size is None else {"type": "const", "value": int(size)}
    return {**own, "description": description}


def _function(inputs: Mapping[str, Mapping[str, Any]], constants: Collection[str], says: str, body: str) -> str:
    """The text of a reference's `run`, which first checks the sizes of inputs that are constants of the text."""
    lines = [f'"""{says}\n"""' if "\n" in says else f'"""{says}"""']
    for name, spec in inputs.items():
        shape = spec["shape"] or ()
        fixed = shape[1:] if shape and shape[0] not in constants else shape  # mostly, the first axis is var
        if fixed and {*constants} >= {*fixed} and "optional" not in spec:
            sizes = ", ".join(map(str.upper, fixed)) + "," * (len(fixed) == 1)
            lines.append(f"assert {name}.shape{'[1:]' * (fixed != shape)} == ({sizes})")
    names = ", ".join(inputs)
    if len(names) > WIDTH:
        names = "".join(f"\n    {name}," for name in inputs) + "\n"
    told = textwrap.indent("\n".join((*lines, body)), "    ")
    return f"@torch.no_grad()\ndef run({names}):\n{told}"
