"""The dialects in which definitions are written, each turned into the one model that everything else reads.

The published schema is strict. FlashInfer's trace dump (`FLASHINFER_TRACE_DUMP`, `flashinfer.trace`) and
SOL-ExecBench say more than it has keys for, and leave open what it asks for; what was made of that is noted.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from traceproof.dataset.axes import System, determined, literal_axis
from traceproof.dataset.binding import bind, entry_of, number_defaults, required
from traceproof.dataset.definition import PUBLISHED_DTYPES, Definition, Dialect, DType
from traceproof.dataset.template_hints import dtype_of, names_of, stated

Json = dict[str, Any]
OWN_KEYS = frozenset({"dialect", "init", "init_entry"})  # of the model alone: no published file has them
DTYPES = {
    "str": DType.STRING,
    "device": DType.STRING,
    "dtype": DType.STRING,
    "float4_e2m1fn_x2": DType.FLOAT4_E2M1,
}
# A size above it that nothing fixes is an eighth of what `init` would take: it is judged as well. MLA's heads, of
# 512 and 64, are the widest size that is the sum of others.
WIDE = 576
SCALED_BY = 8
MOST_IMPOSSIBLE = 3  # constraints taken from names that can not hold, after which no more are tried: a search each


@dataclass(frozen=True, slots=True)
class Reading:
    """A definition as read, and what of its file the model has no place for or had to be completed."""

    definition: Definition
    notes: tuple[str, ...] = ()


def read(value: Any) -> Reading:  # noqa: ANN401 - any JSON value
    """Read a definition in whichever dialect it is written.

    Raises:
        ValidationError: it is a definition in none of them.
        ValueError: the same, told before the model was asked.
    """
    dialect = recognise(value)
    if dialect is Dialect.PUBLISHED:
        if isinstance(value, dict) and OWN_KEYS & value.keys():
            raise ValueError(f"the keys {sorted(OWN_KEYS & value.keys())} are no definition's")
        return Reading(Definition.model_validate(value))
    normaliser = Normaliser(value)
    turned = (normaliser.trace_dump if dialect is Dialect.TRACE_DUMP else normaliser.sol_execbench)()
    return Reading(Definition.model_validate(turned | {"dialect": dialect.value}), tuple(normaliser.notes))


def recognise(value: Any) -> Dialect:  # noqa: ANN401 - any JSON value
    """Which dialect a file is written in, by keys that only one of them has."""
    match value:
        case {"axes": dict() as axes, "inputs": dict() as inputs, "outputs": dict() as outputs}:
            pass
        case _:
            return Dialect.PUBLISHED
    specs = [spec for spec in (*inputs.values(), *outputs.values()) if isinstance(spec, dict)]
    if "custom_inputs_entrypoint" in value or any(_is_expression(axis) for axis in axes.values()):
        return Dialect.SOL_EXECBENCH
    if {"init", "check"} & value.keys() or any("param" in spec for spec in specs):
        return Dialect.TRACE_DUMP
    return Dialect.TRACE_DUMP if _names_api(value) and _is_incomplete(value, specs) else Dialect.PUBLISHED


def _names_api(value: Json) -> bool:
    tags = value.get("tags")
    return isinstance(tags, list) and any(isinstance(tag, str) and tag.startswith("fi_api:") for tag in tags)


def _is_incomplete(value: Json, specs: Sequence[Json]) -> bool:
    """Whether what a published definition has is left to the API's caller: `run`, or a dtype."""
    if "reference" not in value or not _has_run(value["reference"]):
        return True
    return any(isinstance(spec.get("dtype"), str) and _is_open(spec["dtype"]) for spec in specs)


def _is_expression(axis: object) -> bool:
    return isinstance(axis, dict) and axis.get("type") == "expr" and isinstance(axis.get("expression"), str)


def _after(name: str, spec: Json, outputs: Json) -> str | None:
    """The dtype of the output of an input's shape and name, or its last word: `new_state` is `state` after it."""
    word = name.rpartition("_")[2]
    found = (
        str(one.get("dtype"))
        for other, one in sorted(outputs.items(), key=lambda item: item[0] != name)
        if isinstance(one, dict) and one.get("shape") == spec["shape"] and other.rpartition("_")[2] == word
    )
    told = (DTYPES.get(dtype, dtype) for dtype in found)
    return next((dtype for dtype in told if dtype in set(DType) - {DType.STRING, DType.UNKNOWN}), None)


def _is_open(dtype: str) -> bool:
    return dtype in DTYPES or (dtype in set(DType) and dtype not in PUBLISHED_DTYPES)


def _has_run(reference: object) -> bool:
    """Whether a reference has a function `run`; what is no Python at all is left to the model to refuse."""
    if not isinstance(reference, str):
        return True
    try:
        body = ast.parse(reference).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return not any(isinstance(node, ast.FunctionDef) for node in body) or entry_of(reference, ("run",)) is not None


def _sizes(turned: Json) -> Iterator[tuple[str, str]]:
    """Every axis that a tensor names, and which one does."""
    for group in ("inputs", "outputs"):
        for name, spec in turned[group].items():
            shape = spec.get("shape") if isinstance(spec, dict) else None
            sizes = shape if isinstance(shape, list) else []
            yield from ((f"{group}.{name}", size) for size in sizes if isinstance(size, str))


@dataclass
class Normaliser:
    """One definition's file, and what is noted while it is turned into the model's form."""

    value: Json
    notes: list[str] = field(default_factory=list)

    def trace_dump(self) -> Json:
        """FlashInfer's: open dtypes and axes are completed, in-place outputs named, references called by name."""
        known = {
            *("name", "op_type", "description", "tags", "axes", "constraints"),
            *("inputs", "outputs", "reference", "init", "check"),
        }
        turned = self._kept(known - {"check"}, known)
        turned["axes"] = self._axes(turned)
        turned["inputs"], turned["outputs"] = self._inputs(turned), self._outputs(turned)
        constraints = self._constraints(turned)
        if constraints:
            turned["constraints"] = constraints
        turned["axes"] = determined(turned["axes"], constraints, self._note)
        if "reference" in turned:
            for name in required(turned):
                self._note(f"inputs.{name} is optional, but the reference needs it: it is given")
                turned["inputs"][name]["optional"] = False
        turned["reference"] = bind(turned, self._note) if "reference" in turned else ""
        if "init" in turned:
            self._init(turned)
        return turned

    def sol_execbench(self) -> Json:
        """SOL-ExecBench's: expression axes become var axes under a constraint, custom inputs an `init`."""
        known = {
            *("name", "op_type", "description", "tags", "axes", "constraints"),
            *("inputs", "outputs", "reference", "custom_inputs_entrypoint"),
        }
        turned = self._kept(known - {"custom_inputs_entrypoint"}, known) | {"axes": {}}
        turned.setdefault("op_type", "unnamed")
        constraints = list(turned.get("constraints") or ())
        for name, axis in self.value["axes"].items():
            if _is_expression(axis):
                constraints.append(f"{name} == ({axis['expression']})")
                rest = {key: text for key, text in axis.items() if key == "description"}
                axis = {"type": "var", **rest}  # noqa: PLW2901 - the same axis, in the model's form
            turned["axes"][name] = axis
        turned["axes"] = determined(turned["axes"], constraints, self._note)
        if constraints:
            turned["constraints"] = constraints
        for group in ("inputs", "outputs"):
            turned[group] = {name: self._spec(f"{group}.{name}", spec) for name, spec in turned[group].items()}
        entry = self.value.get("custom_inputs_entrypoint")
        if entry is not None:
            if not isinstance(entry, str) or entry_of(str(turned.get("reference")), (entry,)) is None:
                raise ValueError(f"custom_inputs_entrypoint: the reference has no function {entry!r}")
            turned |= {"init": turned["reference"], "init_entry": entry}
        return turned

    def _note(self, what: str) -> None:
        self.notes.append(what)

    def _kept(self, kept: Iterable[str], known: Iterable[str]) -> Json:
        unknown = sorted(map(str, self.value.keys() - set(known)))
        if unknown:
            self._note(f"unknown keys {unknown} are not read")
        return {key: self.value[key] for key in self.value if key in set(kept)}

    def _axes(self, turned: Json) -> Json:
        """All axes: a const one without a value has that of `init`'s or the reference's default, else it is var.

        So does a name that no axis has. One that is negative is a mode of the call and no size.
        """
        axes: Json = {}
        defaults = number_defaults(turned.get("reference", "")) | number_defaults(turned.get("init", ""))
        for name, axis in turned["axes"].items():
            if isinstance(axis, dict) and axis.get("type") == "const" and "value" not in axis:
                axes[name] = self._valued(name, axis, defaults.get(name, 0))
            elif isinstance(axis, dict) and type(axis.get("value")) is int and axis["value"] < 0:
                self._note(f"axes.{name} is {axis['value']}, which is no size: left out")
            else:
                axes[name] = axis
        for where, size in _sizes(turned):
            if size not in axes:
                made, axis = literal_axis(size)
                if made not in axes:
                    axes[made] = axis
                    self._note(f"{where}.shape names {size!r}, which axes does not define")
        return axes

    def _constraints(self, turned: Json) -> list[str]:
        """The constraints, and those that names and descriptions state where none speaks of the same axes."""
        found = turned.get("constraints") or []
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            return []  # which the model will refuse
        sizes = {name: axis.get("value") for name, axis in turned["axes"].items() if isinstance(axis, dict)}
        const = {name: size for name, size in sizes.items() if type(size) is int}
        met = given = [names_of(text) for text in found]
        impossible = 0
        for text, why in stated(turned["axes"], turned["inputs"], turned.get("tags")):
            names = names_of(text)
            if any(names <= other for other in given):
                continue
            axes = [name for name in sizes if any(name in one for one in (*met, names))]
            own = {name: size for name, size in const.items() if name in axes}
            wanted = dict.fromkeys(set(axes) - own.keys(), 1)
            if System(tuple(axes), (*found, text)).solve(own, wanted) is not None:
                self._note(f"{text}: taken from {why}")
                found, met = [*found, text], [*met, names]
                continue
            impossible += 1
            if impossible == MOST_IMPOSSIBLE:
                break
        return found

    def _valued(self, name: str, axis: Json, default: int) -> Json:
        """A const axis without a value: that default or an eighth of it, else a var one."""
        if default <= 0:
            self._note(f"axes.{name} is const and has no value: read as var")
            return {**axis, "type": "var"}
        size = default if default <= WIDE or default % SCALED_BY else default // SCALED_BY
        self._note(f"axes.{name} is const and has no value: read as {size}, by a default")
        return {**axis, "value": size}

    def _spec(self, where: str, spec: Any) -> Any:  # noqa: ANN401 - any JSON value
        """A tensor in the model's words; anything else is left for the model to refuse."""
        if not isinstance(spec, dict):
            return spec
        made = {key: spec[key] for key in spec if key in {"shape", "dtype", "description", "optional", "param"}}
        if spec.keys() - made.keys():
            self._note(f"{where}: unknown keys {sorted(map(str, spec.keys() - made.keys()))} are not read")
        if isinstance(made.get("shape"), list):
            made["shape"] = [literal_axis(size)[0] if isinstance(size, str) else size for size in made["shape"]]
        if isinstance(made.get("dtype"), str):
            made["dtype"] = DTYPES.get(made["dtype"], made["dtype"])
        return made

    def _inputs(self, turned: Json) -> Json:
        """Inputs; a dtype that is left open is that of the state after the call, or of the description or role."""
        inputs = {}
        for name, spec in turned["inputs"].items():
            made = self._spec(f"inputs.{name}", spec)
            if isinstance(made, dict) and made.get("dtype") == DType.UNKNOWN:
                made["dtype"] = _after(name, spec, turned["outputs"]) or str(dtype_of(name, made))
                self._note(f"inputs.{name}.dtype is unknown: read as {made['dtype']}")
            inputs[name] = made
        return inputs

    def _outputs(self, turned: Json) -> Json:
        """Outputs; one that has an input's name is that input, modified in place."""
        outputs = {}
        for name, spec in turned["outputs"].items():
            made = self._spec(f"outputs.{name}", spec)
            if name in turned["inputs"] and isinstance(made, dict):
                self._note(f"outputs.{name} is the input of that name, modified in place: called {name}_out")
                outputs[f"{name}_out"] = made | {"param": name}
            else:
                outputs[name] = made
        return outputs

    def _init(self, turned: Json) -> None:
        """The function that makes inputs: the last one, as the dump writes it after its helpers."""
        entry = entry_of(turned["init"]) if isinstance(turned["init"], str) else None
        if entry is None:
            self._note("init holds no function that could be called: not read")
            del turned["init"]
        else:
            turned["init_entry"] = entry.name
