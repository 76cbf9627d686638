"""How an op_type's calls are found in a model, and how their definitions are composed.

A definition is composed from a table of a TOML file of `templates`, whose texts are written from the definitions'
semantics. Keys of a table:

- `inputs`, `outputs`: tensors with their axes, `:dtype` if not bfloat16, `?` if optional; scalars have no axes;
- `sizes`: const axes, which are constants of the reference under their names in capitals; `unstated`: const axes
  where a tensor has them, and no constants, so that a scaled-down definition may have smaller ones;
- `says`, `run`: docstring and body of the reference's `run`; `head` precedes all functions; functions of the file
  are added if `run` calls them;
- `like`: tables that give what this one leaves out, the last first; `with`: values, for those tables as well.
"""

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
    """A definition before it is known which models share it."""

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
    # tp, ep: whether it depends on the parallelism, which then is a tag
    tp: bool = False
    ep: bool = False
    # the same form with small const axes, by which the reference is checked if its real sizes take more than a few
    # seconds or a gigabyte; None: it is checked itself
    scaled_down: "Draft | None" = field(default=None, repr=False)

    def as_json(self, tags: Sequence[str]) -> dict[str, Any]:
        """The definition with `tags`, as JSON of its file."""
        head = {"name": self.name, "description": self.description, "op_type": self.op_type, "tags": list(tags)}
        constraints = {"constraints": list(self.constraints)} if self.constraints else {}
        tensors = {"inputs": self.inputs, "outputs": self.outputs}
        return {**head, "axes": self.axes, **constraints, **tensors, "reference": self.reference}

    def tags(self, models: Sequence[str], *, tp: int, ep: int, dp: int = 1) -> list[str]:
        """Tags in the dataset's order: stage, status, models, and those that apply."""
        tags = [f"stage:{self.stage}"] if self.stage else []
        tags += ["status:draft", *(f"model:{model}" for model in models)]
        tags += [f"quantization:{self.quantisation}"] if self.quantisation else []
        tags += [f"fi_api:{PACKAGES[TAGGED]}.{self.fi_api}"] if self.fi_api else []
        tags += [f"tp:{tp}"] if self.tp else []
        tags += [f"ep:{ep}"] if self.ep else []
        tags += [f"dp:{dp}"] if self.tp and dp > 1 else []
        return [*tags, *self.extra_tags]


WIDTH = 110  # longest argument list of a reference in one line
TENSOR = re.compile(r"(\w+)(?:\[([^\]]*)\])?(?::(\w+))?(\?)?")


def tensors(text: str, dtype: str) -> dict[str, dict[str, Any]]:
    """The `inputs` or `outputs` of a definition, from text such as `x[rows columns] mask[rows]:bool scale?`."""
    specs: dict[str, dict[str, Any]] = {}
    for name, axes, own, optional in TENSOR.findall(text):
        specs[name] = {"shape": axes.split() or None, "dtype": own or dtype}
        specs[name] |= {"optional": True} if optional else {}
    return specs


def draft(
    op_type: str,
    skeleton: str,
    values: Mapping[str, object],
    *,
    without: Collection[str] = (),
    scaled_down: Draft | None = None,
) -> Draft:
    """A definition with its reference, composed from the table `skeleton` (the module's docstring has its keys).

    `$NAME` in its texts stands for a value of `values`; tensors in `without` are left out. A reference is judged
    by the op's float64 oracle (`traceproof.extract.merge`). Raises KeyError: a placeholder has no value, or a
    tensor or axis no description.
    """
    file = next(tables for tables in _files() if skeleton in tables)

    def filled(entry: Any) -> Any:  # noqa: ANN401 - TOML
        if isinstance(entry, Mapping):
            return {name: filled(value) for name, value in entry.items()}
        if isinstance(entry, list):
            return [filled(value) for value in entry]
        return Template(entry).substitute(values).strip("\n") if isinstance(entry, str) else entry

    table = _with_defaults(file, skeleton)
    values = filled(table.pop("with")) | values
    stated: dict[str, Any] = filled(table)
    described = file["described"] | stated.pop("described", {})
    constants, run = stated.pop("sizes", {}), stated.pop("run")
    sizes = constants | stated.pop("unstated", {})

    every = (tensors(stated.pop(part), "bfloat16") for part in ("inputs", "outputs"))
    inputs, outputs = ({name: spec for name, spec in part.items() if name not in without} for part in every)
    for name, spec in (*inputs.items(), *outputs.items()):
        spec["description"] = described[name]
    used = [axis for spec in (*inputs.values(), *outputs.values()) for axis in spec["shape"] or ()]
    before = [f"{name.upper()} = {size}" for name, size in constants.items()] + [stated.pop("head", "")]
    functions = [filled(text) for name, text in file["functions"].items() if f"{name}(" in run]
    called = _run_code(inputs, constants, stated.pop("says"), run)
    imports = "import math\n\nimport torch" if "math." in "".join((run, *functions)) else "import torch"
    parts = ["\n\n".join(filter(None, (imports, "\n".join(before).strip("\n")))), *functions, called]
    axes: dict[str, dict[str, Any]] = {}
    for axis in dict.fromkeys([*used, *constants]):
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


def texts(name: str) -> Mapping[str, str]:
    """Values for `draft` out of a table that holds nothing else."""
    return next(tables[name] for tables in _files() if name in tables)


def _with_defaults(file: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of a file, completed by the tables that it is `like`."""
    completed: dict[str, Any] = {"with": {}}
    for table in (*(_with_defaults(file, other) for other in file[name].get("like", ())), file[name]):
        completed |= table | {"with": completed["with"] | table.get("with", {})}
    return {key: value for key, value in completed.items() if key != "like"}


@cache
def _files() -> list[dict[str, Any]]:
    folder = resources.files("traceproof.models").joinpath("templates")
    return [tomllib.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir()]


def _run_code(inputs: Mapping[str, Mapping[str, Any]], constants: Collection[str], doc: str, body: str) -> str:
    """Code of a reference's `run`: docstring, asserts that inputs have the fixed sizes in `constants`, `body`."""
    lines = [f'"""{doc}\n"""' if "\n" in doc else f'"""{doc}"""']
    for name, spec in inputs.items():
        shape = spec["shape"] or ()
        fixed = shape[1:] if shape and shape[0] not in constants else shape  # a var axis has no fixed size
        if fixed and {*constants} >= {*fixed} and "optional" not in spec:
            sizes = ", ".join(map(str.upper, fixed)) + "," * (len(fixed) == 1)
            lines.append(f"assert {name}.shape{'[1:]' * (fixed != shape)} == ({sizes})")
    names = ", ".join(inputs)
    if len(names) > WIDTH:
        names = "".join(f"\n    {name}," for name in inputs) + "\n"
    indented = textwrap.indent("\n".join((*lines, body)), "    ")
    return f"@torch.no_grad()\ndef run({names}):\n{indented}"


# What an op_type says of models


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which calls of a model become definitions, and in which form."""

    page_sizes: Sequence[int] = (1, 64)  # of paged attention; those of the dataset
    per_rank: bool = False  # projections as one rank launches them, not the model's full shapes
    second_reading: bool = True  # whether transformers' model must confirm each call


Facts = dict[str, Any]
Differs = Callable[[KernelCall, Evidence], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """An op_type's part in extraction."""

    # name of SGLang's class -> (kind of module, function of the module and its holder that gives its facts). Runs
    # where SGLang is installed.
    readers: Mapping[str, tuple[str, Callable[[Any, Any], Facts]]] = field(default_factory=dict)
    # kind of module -> its call, or why it has none; None: another op_type decides
    calls: Mapping[str, Callable[[ModelModule, Reading], KernelCall | str | None]] = field(default_factory=dict)
    once: Callable[[Reading], KernelCall] | None = None  # the call that a whole model makes once
    # kind of call -> how transformers' model differs from a call; None: it agrees
    differs: Mapping[str, Differs] = field(default_factory=dict)
    # kind of call -> its definitions, or why the dataset has no form for it
    drafts: Mapping[str, Callable[[KernelCall, Choice], Iterable[Draft | str]]] = field(default_factory=dict)


def call_of(module: ModelModule, kind: str, *names: str, note: str = "", **facts: Any) -> KernelCall:  # noqa: ANN401 - constants
    """The KernelCall of a module, with these facts of the module, and further ones."""
    of_module = {name: module.facts[name] for name in names}
    return kernel(kind, count=module.count, path=module.path, note=note, **of_module, **facts)


def dtype_name(tensor: Any) -> str:  # noqa: ANN401 - a tensor or a parameter
    """Name of a tensor's dtype, as in definitions."""
    return str(tensor.dtype).removeprefix("torch.")


def compared_with(
    kind: str, terms: Callable[[Mapping[str, Any], Evidence], Facts], *, counted: bool = True, **also: object
) -> Differs:
    """A comparison of a call with transformers' modules of a kind; `terms` turns their facts into the call's.

    `counted`: the call must be made as often; `also` are further facts that it must have.
    """

    def differs(call: KernelCall, evidence: Evidence) -> str | None:
        return evidence.differs(call, kind, lambda facts: terms(facts, evidence), counted=counted, **also)

    return differs
