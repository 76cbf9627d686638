"""How an op_type's calls are found in a model, and what their definitions are put together from."""

import re
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading, kernel
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

    def as_json(self, tags: Sequence[str]) -> dict[str, Any]:
        """The definition with `tags`, as its file has it."""
        head = {"name": self.name, "description": self.description, "op_type": self.op_type, "tags": list(tags)}
        constraints = {"constraints": list(self.constraints)} if self.constraints else {}
        tensors = {"inputs": self.inputs, "outputs": self.outputs}
        return {**head, "axes": self.axes, **constraints, **tensors, "reference": self.reference}

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
    axes: dict[str, dict[str, Any]] = {}
    for axis in dict.fromkeys([*used, *sizes]):
        kind = {"type": "const", "value": int(sizes[axis])} if axis in sizes else {"type": "var"}
        axes[axis] = {**kind, "description": described[axis]}
    return Draft(
        op_type=op_type,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference="\n\n\n".join(parts) + "\n",
        scaled_down=scaled_down,
        **stated,
    )


@cache
def _files() -> list[dict[str, Any]]:
    folder = resources.files("traceproof.models").joinpath("templates")
    return [tomllib.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir()]


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


# What an op_type says of models


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a caller chooses of the definitions."""

    page_sizes: Sequence[int]  # of the paged attention
    per_rank: bool  # projections as one rank launches them, rather than the model's full shapes


Facts = dict[str, Any]
Differs = Callable[[KernelCall, Evidence], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """An op_type's part in extraction."""

    # SGLang's class, by its name -> the kind of module that it is, and what reads the facts of one with whoever
    # holds it. Run where SGLang is.
    readers: Mapping[str, tuple[str, Callable[[Any, Any], Facts]]] = field(default_factory=dict)
    # kind of module -> its call, or why it becomes none; None: it is for another op_type to say
    calls: Mapping[str, Callable[[ModelModule, Reading], KernelCall | str | None]] = field(default_factory=dict)
    once: Callable[[Reading], KernelCall] | None = None  # the call that a whole model makes once
    # kind of call -> what transformers' model says otherwise of one, both numbers; None: it agrees
    differs: Mapping[str, Differs] = field(default_factory=dict)
    # kind of call -> its definitions, or why the dataset has no form for it
    drafts: Mapping[str, Callable[[KernelCall, Choice], Iterable[Draft | str]]] = field(default_factory=dict)


def call_of(module: ModelModule, kind: str, *names: str, note: str = "", **facts: Any) -> KernelCall:  # noqa: ANN401 - constants
    """The call that a module makes: the module's facts of these names, and further ones."""
    own = {name: module.facts[name] for name in names}
    return kernel(kind, count=module.count, path=module.path, note=note, **own, **facts)


def dtype_name(held: Any) -> str:  # noqa: ANN401 - a tensor or a parameter
    """Name of a tensor's dtype, as definitions have it."""
    return str(held.dtype).removeprefix("torch.")


def held_against(
    kind: str, terms: Callable[[Mapping[str, Any], Evidence], Facts], *, counted: bool = True, **also: object
) -> Differs:
    """What transformers says otherwise by its modules of a kind, whose facts are on one rank `terms` of the call.

    `counted`: the call must be made as often; `also` are further facts that it must have.
    """

    def differs(call: KernelCall, evidence: Evidence) -> str | None:
        return evidence.differs(call, kind, lambda facts: terms(facts, evidence), counted=counted, **also)

    return differs
