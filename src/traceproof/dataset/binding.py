"""A reference that is called by keyword, as a function `run` that takes the definition's inputs in their order."""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HELD = "_input"  # behind an input's name: of the output of `run_of_init` that holds it
COLUMNS = "_columns"  # and of the one that says that its last two axes lie the other way round in memory
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
    """A top-level function: parameters in order, which of them have a default, whether it takes any keyword."""

    name: str
    parameters: tuple[str, ...]
    defaulted: frozenset[str]
    open: bool

    @property
    def required(self) -> tuple[str, ...]:
        """Parameters that must be given."""
        return tuple(name for name in self.parameters if name not in self.defaulted)


def number_defaults(source: object) -> dict[str, int]:
    """The whole numbers that the last function of a text has as defaults, by parameter; {}: it is no Python."""
    try:
        found = _functions(str(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    arguments = _arguments(found[next(reversed(found))], found) if found else {}
    numbers = {name: one.value for name, one in arguments.items() if isinstance(one, ast.Constant)}
    return {name: value for name, value in numbers.items() if type(value) is int}


def _functions(source: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def _arguments(node: ast.FunctionDef, known: Mapping[str, ast.FunctionDef]) -> dict[str, ast.expr | None]:
    """A function's parameters in order with their defaults, and those of a function that gets all its keywords."""
    given = node.args
    placed = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(placed) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    found = {one.arg: default for one, default in zip([*placed, *given.kwonlyargs], defaults, strict=True)}
    others = {name: one for name, one in known.items() if one is not node}
    for call in ast.walk(node) if given.kwarg is not None else ():
        match call:
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[ast.keyword(arg=None)]) if name in others:
                found |= _arguments(others[name], others)
    return found


def entry_of(source: str, names: Iterable[str] = (), *, handed_on: bool = False) -> Function | None:
    """The top-level function of one of `names`, else (none given) `run`, else the last one; None: there is none.

    With `handed_on`, a function that does nothing with its keywords but hand them on has those of the other one.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the source is no Python.
    """
    found = _functions(source)
    wanted = list(names) or ["run", *reversed(found)]
    node = next((found[name] for name in wanted if name in found), None)
    if node is None:
        return None
    arguments = _arguments(node, found if handed_on else {})
    defaulted = frozenset(name for name, default in arguments.items() if default is not None)
    return Function(node.name, tuple(arguments), defaulted, node.args.kwarg is not None)


def required(definition: Mapping[str, Any]) -> list[str]:
    """Optional inputs that the reference has no default for."""
    try:
        entry = entry_of(definition["reference"])
    except (TypeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    named = entry.required if entry is not None else ()
    inputs = definition["inputs"]
    return [name for name in named if isinstance(inputs.get(name), dict) and inputs[name].get("optional")]


def bind(definition: Mapping[str, Any], note: Callable[[str], None]) -> Any:  # noqa: ANN401 - any JSON value
    """The reference with a function `run`; what is no text, no Python or has no function stays as it is."""
    source = definition["reference"]
    try:
        entry = entry_of(source)
    except (TypeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    if entry is None or entry.name == "run":
        return source
    given = _given(entry, definition, note)
    return f"{source.rstrip()}{HEADER}{_run(definition, entry, given)}"


def _run(definition: Mapping[str, Any], entry: Function, given: Mapping[str, str]) -> str:
    """The text of `run`; an optional input that is None is left to the parameter's default."""
    inputs = definition["inputs"]
    left_out = [name for name, value in given.items() if name in entry.defaulted and value in inputs]
    keywords = ", ".join(f"{name}={value}" for name, value in given.items() if name not in left_out)
    lines = [f"def run({', '.join(inputs)}):"]
    if left_out:
        lines.append(f"    given = {{{', '.join(f'{name!r}: {given[name]}' for name in left_out)}}}")
        lines.append("    given = {name: value for name, value in given.items() if value is not None}")
        keywords = ", ".join(filter(None, (keywords, "**given")))
    lines.append(f"    returned = {entry.name}({keywords})")
    changed = [spec.get("param") for spec in definition["outputs"].values() if isinstance(spec, dict)]
    if changed and all(name in inputs for name in changed):
        lines += ["    if returned is None:", f"        returned = ({', '.join(map(str, changed))},)"]
    return "\n".join([*lines, "    return returned", ""])


def run_of_init(
    definition: Mapping[str, Any], entry: Function, free: Iterable[str], const: Mapping[str, int]
) -> str:
    """An `init` followed by a `run` that takes the free axes and a seed, and gives what it makes by input.

    What it makes by phase of a call (`plan`, `run`) is put together. A value goes to the input of its name, else
    to the first one left that must be given and has its dtype and number of dimensions; so do elements of a tuple
    that is no input. An axis that has a default and is not fixed is left to it.
    """
    axes = ", ".join(
        [*(f"{name!r}: {name}" for name in free), *(f"{name!r}: {size}" for name, size in const.items())]
    )
    known = {"axes": f"{{{axes}}}", "device": "'cpu'", "seed": "seed"}
    known |= {name: repr(size) for name, size in const.items()} | {name: name for name in free}
    keywords = ", ".join(f"{name}={known[name]}" for name in entry.parameters if name in known)
    inputs = definition["inputs"]
    kinds = {
        name: None if spec["shape"] is None else (f"torch.{spec['dtype']}", len(spec["shape"]))
        for name, spec in inputs.items()
    }
    needed = [name for name, spec in inputs.items() if not spec.get("optional")]
    source = definition["init"].rstrip()
    text = RUN_OF_INIT.format(
        free=", ".join([*free, "seed"]),
        call=f"{entry.name}({keywords})",
        kinds=kinds,
        needed=needed,
        held=HELD,
        columns=COLUMNS,
    )
    return f"{source}{HEADER}{text}"


def _given(entry: Function, definition: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, str]:
    """What each parameter is given, as an expression over the inputs."""
    inputs = definition["inputs"]
    given = _by_name(entry, inputs)
    sizes = {name: _size(name, definition) for name in entry.required if name not in given}
    given |= {name: size for name, size in sizes.items() if size is not None}
    missing = [name for name, size in sizes.items() if size is None]
    left = _unused((name for name in inputs if name not in entry.parameters), given)
    left = [name for name in left if not inputs[name].get("optional")]
    given |= _in_order(missing, left, note)
    if entry.open:
        given |= {name: name for name in _unused(left, given)}
    unused = _unused(inputs, given)
    if unused:
        note(f"reference: it does not take the inputs {unused}")
    return given


def _in_order(missing: Sequence[str], left: Sequence[str], note: Callable[[str], None]) -> dict[str, str]:
    """Parameters of names that nothing has: the inputs left over, if there are as many, else None.

    A single one takes several as a tuple: FlashInfer's caches of keys and values are such a parameter.
    """
    if len(missing) == len(left):
        return dict(zip(missing, left, strict=True))
    if len(missing) == 1 and left:
        note(f"reference: its parameter {missing[0]} is no input; it gets a tuple of {', '.join(left)}")
        return {missing[0]: f"({', '.join(left)})"}
    for name in missing:
        note(f"reference: its parameter {name} is no input; None is passed")
    return dict.fromkeys(missing, "None")


def _unused(names: Iterable[str], given: Mapping[str, str]) -> list[str]:
    used = {word for value in given.values() for word in value.strip("()").split(", ")}
    return [name for name in names if name not in used]


def _by_name(entry: Function, inputs: Iterable[str]) -> dict[str, str]:
    """The parameters that are called as an input is, or as one of the other inputs but for its case."""
    given = {name: name for name in inputs if name in entry.parameters}
    folded = {name.lower(): name for name in inputs if name not in given}
    others = [name for name in entry.parameters if name not in given and name.lower() in folded]
    return given | {name: folded[name.lower()] for name in others}


def _size(name: str, definition: Mapping[str, Any]) -> str | None:
    """The size of an axis of that name, as an expression."""
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
