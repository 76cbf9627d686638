"""The two dialects of definitions, both turned into the one model that everything else reads.

The published schema is strict. FlashInfer's trace dump (`FLASHINFER_TRACE_DUMP`, `flashinfer.trace`) has more than
the schema has keys for, and leaves out things that it requires; notes say what was left out or completed. A
reference that is called by keyword gets a function `run` that takes the definition's inputs in order.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traceproof.dataset.constraints import System, determined, literal_axis, names
from traceproof.dataset.definition import PUBLISHED_DTYPES, Definition, Dialect, DType
from traceproof.dataset.hints import dtype_of, stated_constraints

HELD = "_input"  # suffix of `run_of_init`'s output that holds an input
COLUMNS = "_columns"  # suffix of its output that says that an input's last two axes are exchanged in memory
HEADER = "\n\n# The call by position, added where the definition was read.\n"
RUN_OF_INIT = """import torch


def run({free}):
    parts, made, found = [{call}], {{}}, {{}}
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        made.update(part)
    kinds, needed = {kinds}, {needed}
    lower = {{name.lower(): name for name in kinds}}
    pairs = [name for name, value in made.items() if isinstance(value, (tuple, list)) and name not in kinds]
    made.update({{f"{{name}} {{at}}": one for name in pairs for at, one in enumerate(made[name])}})
    kept = (torch.Tensor, bool, int, float)
    for name in [name for name, value in made.items() if isinstance(value, kept)]:
        own = name if name in kinds else lower.get(name.lower())
        if own is not None:
            found[own] = made.pop(name)
    for name in [name for name in needed if name not in found]:
        for other, value in made.items():
            tensor = isinstance(value, torch.Tensor)
            if isinstance(value, kept) and kinds[name] == ((str(value.dtype), value.dim()) if tensor else None):
                found[name] = made.pop(other)
                break
    wide = [name for name, value in found.items() if isinstance(value, torch.Tensor) and value.dim() > 1]
    turned = [name for name in wide if not found[name].is_contiguous() and found[name].mT.is_contiguous()]
    given = {{name + {held!r}: value for name, value in found.items()}}
    return {{**given, **{{name + {columns!r}: True for name in turned}}}}
"""


@dataclass(frozen=True, slots=True)
class Function:
    """A function: its parameters in order, those with a default, and whether it takes any keyword (`open`)."""

    name: str
    parameters: tuple[str, ...]
    defaulted: frozenset[str]
    open: bool
    positional: range  # how many arguments it can be called with, all by position

    @property
    def required(self) -> tuple[str, ...]:
        """Parameters without a default."""
        return tuple(name for name in self.parameters if name not in self.defaulted)


def body_of(source: object) -> list[ast.stmt]:
    """The top-level statements of a source; [] if it is no Python."""
    try:
        return ast.parse(source).body if isinstance(source, str) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _functions(source: object) -> dict[str, ast.FunctionDef]:
    """The top-level functions of a source, by name; {} if it is no Python."""
    return {node.name: node for node in body_of(source) if isinstance(node, ast.FunctionDef)}


def number_defaults(source: object) -> dict[str, int]:
    """Integer defaults of a source's last function, by parameter; {} if it is no Python."""
    functions = _functions(source)
    arguments = _arguments(functions[next(reversed(functions))], functions) if functions else {}
    numbers = {name: default.value for name, default in arguments.items() if isinstance(default, ast.Constant)}
    return {name: value for name, value in numbers.items() if type(value) is int}


def _arguments(node: ast.FunctionDef, known: Mapping[str, ast.FunctionDef]) -> dict[str, ast.expr | None]:
    """A function's parameters with their defaults, and those of a function to which it passes all keywords."""
    args = node.args
    placed = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(placed) - len(args.defaults)), *args.defaults, *args.kw_defaults]
    parameters = {arg.arg: default for arg, default in zip([*placed, *args.kwonlyargs], defaults, strict=True)}
    others = {name: function for name, function in known.items() if function is not node}
    for call in ast.walk(node) if args.kwarg is not None else ():
        match call:
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[ast.keyword(arg=None)]) if name in others:
                parameters |= _arguments(others[name], others)
    return parameters


def entry_of(source: object, names: Iterable[str] = (), *, handed_on: bool = False) -> Function | None:
    """The top-level function called one of `names`, by default `run` or else the last one; None: there is none.

    With `handed_on`, a function that passes its keywords to another one has that one's parameters, too.
    """
    functions = _functions(source)
    candidates = list(names) or ["run", *reversed(functions)]
    node = next((functions[name] for name in candidates if name in functions), None)
    if node is None:
        return None
    arguments, args = _arguments(node, functions if handed_on else {}), node.args
    defaulted = frozenset(name for name, default in arguments.items() if default is not None)
    most = len([*args.posonlyargs, *args.args])
    positional = range(most - len(args.defaults), sys.maxsize if args.vararg else most + 1)
    callable_so = None not in args.kw_defaults  # a keyword that must be given can not be
    return Function(
        node.name, tuple(arguments), defaulted, args.kwarg is not None, positional if callable_so else range(0)
    )


def required(definition: Mapping[str, Any]) -> list[str]:
    """Optional inputs for which the reference has no default."""
    entry = entry_of(definition["reference"])
    named = entry.required if entry is not None else ()
    inputs = definition["inputs"]
    return [name for name in named if isinstance(inputs.get(name), dict) and inputs[name].get("optional")]


def bind(definition: Mapping[str, Any], note: Callable[[str], None]) -> Any:  # noqa: ANN401 - any JSON value
    """The reference's source with a function `run` added; unchanged if it is no Python or has no function."""
    source = definition["reference"]
    entry = entry_of(source)
    if entry is None or entry.name == "run":
        return source
    inputs, arguments = definition["inputs"], _arguments_for(entry, definition, note)
    # a None is not passed, so that the parameter's default holds
    optional = {name for name, spec in inputs.items() if isinstance(spec, dict) and spec.get("optional")}
    free = {name for name, value in arguments.items() if name not in entry.parameters and value in optional}
    left_out = [name for name, value in arguments.items() if value in inputs and name in entry.defaulted | free]
    keywords = ", ".join(f"{name}={value}" for name, value in arguments.items() if name not in left_out)
    lines = [f"def run({', '.join(inputs)}):"]
    if left_out:
        lines.append(f"    given = {{{', '.join(f'{name!r}: {arguments[name]}' for name in left_out)}}}")
        lines.append("    given = {name: value for name, value in given.items() if value is not None}")
        keywords = ", ".join(filter(None, (keywords, "**given")))
    lines.append(f"    returned = {entry.name}({keywords})")
    changed = [spec.get("param") for spec in definition["outputs"].values() if isinstance(spec, dict)]
    if changed and all(name in inputs for name in changed):
        lines += ["    if returned is None:", f"        returned = ({', '.join(map(str, changed))},)"]
    run = "\n".join([*lines, "    return returned", ""])
    return f"{source.rstrip()}{HEADER}{run}"


def run_of_init(
    definition: Mapping[str, Any], entry: Function, free: Iterable[str], const: Mapping[str, int]
) -> str:
    """Source of an `init` and a `run` that takes free axes and a seed and returns what it makes, by input.

    Values that it makes by phase of a call (`plan`, `run`) are merged. A value belongs to the input of its name,
    else to the first required input left with its dtype and number of dimensions; likewise each element of a tuple
    that is no input. Axes that have a default and are not fixed are not passed.
    """
    sizes = {name: name for name in free} | {name: repr(size) for name, size in const.items()}
    axes = ", ".join(f"{name!r}: {size}" for name, size in sizes.items())
    known = {"axes": f"{{{axes}}}", "device": "'cpu'", "seed": "seed"} | sizes
    keywords = ", ".join(f"{name}={known[name]}" for name in entry.parameters if name in known)
    inputs = definition["inputs"]
    kinds = {
        name: None if spec["shape"] is None else (f"torch.{spec['dtype']}", len(spec["shape"]))
        for name, spec in inputs.items()
    }
    needed = [name for name, spec in inputs.items() if not spec.get("optional")]
    parts = {
        "free": ", ".join([*free, "seed"]),
        "call": f"{entry.name}({keywords})",
        "kinds": kinds,
        "needed": needed,
    }
    text = RUN_OF_INIT.format(**parts, held=HELD, columns=COLUMNS)
    return f"{definition['init'].rstrip()}{HEADER}{text}"


def _arguments_for(entry: Function, definition: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, str]:
    """Expressions over the inputs for each of the reference's parameters."""
    inputs = definition["inputs"]
    arguments = {name: name for name in inputs if name in entry.parameters}
    folded = {name.lower(): name for name in inputs if name not in arguments}  # same name in another case
    others = [name for name in entry.parameters if name not in arguments and name.lower() in folded]
    arguments |= {name: folded[name.lower()] for name in others}
    sizes = {name: _size(name, definition) for name in entry.required if name not in arguments}
    arguments |= {name: size for name, size in sizes.items() if size is not None}
    missing = [name for name, size in sizes.items() if size is None]
    unused_inputs = _unused((name for name in inputs if name not in entry.parameters), arguments)
    unused_inputs = [name for name in unused_inputs if not inputs[name].get("optional")]
    arguments |= _in_order(missing, unused_inputs, note)
    if entry.open:
        arguments |= {name: name for name in _unused((*unused_inputs, *inputs), arguments)}
    unused = _unused(inputs, arguments)
    if unused:
        note(f"reference: it does not take the inputs {unused}")
    return arguments


def _in_order(missing: Sequence[str], inputs: Sequence[str], note: Callable[[str], None]) -> dict[str, str]:
    """Inputs for parameters that no input is named after: in order if there are as many, else None.

    A single parameter gets several inputs as a tuple: FlashInfer's caches of keys and values are such a parameter.
    """
    if len(missing) == len(inputs):
        return dict(zip(missing, inputs, strict=True))
    if len(missing) == 1 and inputs:
        note(f"reference: its parameter {missing[0]} is no input; it gets a tuple of {', '.join(inputs)}")
        return {missing[0]: f"({', '.join(inputs)})"}
    for name in missing:
        note(f"reference: its parameter {name} is no input; None is passed")
    return dict.fromkeys(missing, "None")


def _unused(names: Iterable[str], arguments: Mapping[str, str]) -> list[str]:
    used = {word for value in arguments.values() for word in value.strip("()").split(", ")}
    return [name for name in names if name not in used]


def _size(name: str, definition: Mapping[str, Any]) -> str | None:
    """The size of the axis of that name, as an expression; None: there is none."""
    axis = definition["axes"].get(name)
    if not isinstance(axis, dict):
        return None
    if axis.get("type") == "const":
        return repr(axis["value"])
    for tensor, spec in definition["inputs"].items():
        shape = spec.get("shape") if isinstance(spec, dict) else None
        if shape and name in shape and not spec.get("optional"):
            return f"{tensor}.shape[{shape.index(name)}]"
    return None


Json = dict[str, Any]
OWN_KEYS = frozenset({"dialect", "init", "init_entry"})  # of the model only, not of published files
KEYS = frozenset(Definition.model_fields) - OWN_KEYS
DTYPES = {
    "str": DType.STRING,
    "device": DType.STRING,
    "dtype": DType.STRING,
    "float4_e2m1fn_x2": DType.FLOAT4_E2M1,
}
OPEN_DTYPES = frozenset(DTYPES) | (frozenset(DType) - PUBLISHED_DTYPES)
# A larger default that nothing fixes is divided by SCALED_BY, since `init` would make it. MLA's 512 + 64 is the
# largest size that is a sum of others.
WIDE = 576
SCALED_BY = 8
# constraints taken from names that can not hold, after which no more are tried, as each takes a search
MOST_IMPOSSIBLE = 3


@dataclass(frozen=True, slots=True)
class ReadDefinition:
    """A definition, and notes on what of its file was left out or completed."""

    definition: Definition
    notes: tuple[str, ...] = ()


def read(value: Any) -> ReadDefinition:  # noqa: ANN401 - any JSON value
    """Read a definition in either dialect.

    Raises ValidationError: it is a definition in neither; ValueError: the same, found before validation.
    """
    dialect = recognise(value)
    if dialect is Dialect.PUBLISHED:
        if isinstance(value, dict) and OWN_KEYS & value.keys():
            raise ValueError(f"the keys {sorted(OWN_KEYS & value.keys())} are no definition's")
        return ReadDefinition(Definition.model_validate(value))
    normaliser = Normaliser(value)
    turned = normaliser.trace_dump() | {"dialect": dialect.value}
    return ReadDefinition(Definition.model_validate(turned), tuple(normaliser.notes))


def recognise(value: Any) -> Dialect:  # noqa: ANN401 - any JSON value
    """The dialect of a file's content, by keys that only one of them has."""
    groups = [value.get(key) if isinstance(value, dict) else None for key in ("axes", "inputs", "outputs")]
    if not all(isinstance(group, dict) for group in groups):
        return Dialect.PUBLISHED
    specs = [spec for group in ("inputs", "outputs") for spec in value[group].values() if isinstance(spec, dict)]
    if {"init", "check"} & value.keys() or any("param" in spec for spec in specs):
        return Dialect.TRACE_DUMP
    tags = value.get("tags")
    named = isinstance(tags, list) and any(isinstance(tag, str) and tag.startswith("fi_api:") for tag in tags)
    if not named:
        return Dialect.PUBLISHED
    # What a published definition must have is left to the API's caller: a dtype, or `run`.
    undecided = any(isinstance(spec.get("dtype"), str) and spec["dtype"] in OPEN_DTYPES for spec in specs)
    functions = _functions(value.get("reference"))  # if it is no Python, the model will refuse it
    incomplete = undecided or "reference" not in value or (functions and "run" not in functions)
    return Dialect.TRACE_DUMP if incomplete else Dialect.PUBLISHED


def _after(name: str, spec: Json, outputs: Json) -> str | None:
    """The dtype of the output with an input's shape and last word of its name, such as `new_state` for `state`."""
    word = name.rpartition("_")[2]
    stated = (
        str(after.get("dtype"))
        for key, after in sorted(outputs.items(), key=lambda item: item[0] != name)
        if isinstance(after, dict) and after.get("shape") == spec["shape"] and key.rpartition("_")[2] == word
    )
    dtypes = (DTYPES.get(dtype, dtype) for dtype in stated)
    return next((dtype for dtype in dtypes if dtype in set(DType) - {DType.STRING, DType.UNKNOWN}), None)


@dataclass
class Normaliser:
    """Turns one trace dump into the model's form, and notes what it changes."""

    value: Json
    notes: list[str] = field(default_factory=list)

    def trace_dump(self) -> Json:
        """The dump as JSON of the model: dtypes and axes completed, in-place outputs renamed, `run` added."""
        unknown = sorted(map(str, self.value.keys() - KEYS - {"init", "check"}))
        if unknown:
            self._note(f"unknown keys {unknown} are not read")
        turned = {key: self.value[key] for key in self.value if key in KEYS | {"init"}}
        turned["axes"] = self._axes(turned)
        turned["inputs"], turned["outputs"] = self._tensors(turned)
        constraints = self._constraints(turned)
        if constraints:
            turned["constraints"] = constraints
        turned["axes"] = determined(turned["axes"], constraints, self._note)
        if "reference" in turned:
            for name in required(turned):
                self._note(f"inputs.{name} is optional, but the reference needs it: it is given")
                turned["inputs"][name]["optional"] = False
        turned["reference"] = bind(turned, self._note) if "reference" in turned else ""
        if "init" in turned:  # the dump writes helpers first, so its last function is `init`
            entry = entry_of(turned["init"]) if isinstance(turned["init"], str) else None
            if entry is None:
                self._note("init holds no function that could be called: not read")
                del turned["init"]
            else:
                turned["init_entry"] = entry.name
        return turned

    def _note(self, what: str) -> None:
        self.notes.append(what)

    def _axes(self, turned: Json) -> Json:
        """All axes: a const one without a value gets `init`'s or the reference's default, or else becomes var.

        A name in a shape that is no axis becomes a var axis. An axis with a negative value is a mode of the call,
        and is left out.
        """
        axes: Json = {}
        defaults = number_defaults(turned.get("reference", "")) | number_defaults(turned.get("init", ""))
        for name, axis in turned["axes"].items():
            if isinstance(axis, dict) and axis.get("type") == "const" and "value" not in axis:
                size = defaults.get(name, 0)
                if size <= 0:
                    self._note(f"axes.{name} is const and has no value: read as var")
                    axes[name] = {**axis, "type": "var"}
                    continue
                size = size if size <= WIDE or size % SCALED_BY else size // SCALED_BY
                self._note(f"axes.{name} is const and has no value: read as {size}, by a default")
                axes[name] = {**axis, "value": size}
            elif isinstance(axis, dict) and type(axis.get("value")) is int and axis["value"] < 0:
                self._note(f"axes.{name} is {axis['value']}, which is no size: left out")
            else:
                axes[name] = axis
        specs = {(group, name): spec for group in ("inputs", "outputs") for name, spec in turned[group].items()}
        for (group, name), spec in specs.items():
            shape = spec.get("shape") if isinstance(spec, dict) else None
            for size in shape if isinstance(shape, list) else []:
                name_of_size, axis = literal_axis(size) if isinstance(size, str) else ("", {})
                if name_of_size and size not in axes and name_of_size not in axes:
                    axes[name_of_size] = axis
                    self._note(f"{group}.{name}.shape names {size!r}, which axes does not define")
        return axes

    def _constraints(self, turned: Json) -> list[str]:
        """The constraints, and those that names and descriptions state about axes without one."""
        constraints = turned.get("constraints") or []
        if not isinstance(constraints, list) or not all(isinstance(text, str) for text in constraints):
            return []  # the model will refuse them
        sizes = {name: axis.get("value") for name, axis in turned["axes"].items() if isinstance(axis, dict)}
        const = {name: size for name, size in sizes.items() if type(size) is int}
        met = stated = [names(text) for text in constraints]
        impossible = 0
        for text, why in stated_constraints(turned["axes"], turned["inputs"], turned.get("tags")):
            own_names = names(text)
            if any(own_names <= others for others in stated):
                continue
            axes = [name for name in sizes if any(name in used for used in (*met, own_names))]
            const_of_axes = {name: size for name, size in const.items() if name in axes}
            wanted = dict.fromkeys(set(axes) - const_of_axes.keys(), 1)
            # taken only if it can hold together with those before
            if System(tuple(axes), (*constraints, text)).solve(const_of_axes, wanted) is not None:
                self._note(f"{text}: taken from {why}")
                constraints, met = [*constraints, text], [*met, own_names]
                continue
            impossible += 1
            if impossible == MOST_IMPOSSIBLE:
                break
        return constraints

    def _spec(self, where: str, spec: Any) -> Any:  # noqa: ANN401 - any JSON value
        """A tensor's spec in the model's terms; what is no object is left for the model to refuse."""
        if not isinstance(spec, dict):
            return spec
        turned = {key: spec[key] for key in spec if key in {"shape", "dtype", "description", "optional", "param"}}
        if spec.keys() - turned.keys():
            self._note(f"{where}: unknown keys {sorted(map(str, spec.keys() - turned.keys()))} are not read")
        if isinstance(turned.get("shape"), list):
            turned["shape"] = [literal_axis(s)[0] if isinstance(s, str) else s for s in turned["shape"]]
        if isinstance(turned.get("dtype"), str):
            turned["dtype"] = DTYPES.get(turned["dtype"], turned["dtype"])
        return turned

    def _tensors(self, turned: Json) -> tuple[Json, Json]:
        """Inputs and outputs in the model's terms.

        An input of unknown dtype gets that of the state after the call, or follows its description or role. An
        output with an input's name is that input, modified in place.
        """
        inputs: Json = {}
        outputs: Json = {}
        for name, spec in turned["inputs"].items():
            turned_spec = inputs[name] = self._spec(f"inputs.{name}", spec)
            if isinstance(turned_spec, dict) and turned_spec.get("dtype") == DType.UNKNOWN:
                turned_spec["dtype"] = _after(name, spec, turned["outputs"]) or str(dtype_of(name, turned_spec))
                self._note(f"inputs.{name}.dtype is unknown: read as {turned_spec['dtype']}")
        for name, spec in turned["outputs"].items():
            turned_spec = self._spec(f"outputs.{name}", spec)
            if name in turned["inputs"] and isinstance(turned_spec, dict):
                self._note(f"outputs.{name} is the input of that name, modified in place: called {name}_out")
                open_dtype = turned_spec.get("dtype") == DType.UNKNOWN
                outputs[f"{name}_out"] = (
                    turned_spec | ({"dtype": inputs[name]["dtype"]} if open_dtype else {}) | {"param": name}
                )
            else:
                outputs[name] = turned_spec
        return inputs, outputs
