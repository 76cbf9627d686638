"""A baseline solution: a ground-truth call in a file that stands alone, emitted from an adapter."""

import ast
import inspect
import keyword
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.dataset.records import BASELINE, Solution
from traceproof.lazy import torch
from traceproof.ops import lookup
from traceproof.ops.adapter import Adapter
from traceproof.publish.partial import API, Partial, Unemittable, literal
from traceproof.stacks import STACK_OF, STACKS
from traceproof.stacks.base import Stack
from traceproof.text import literal as quoted
from traceproof.text import unquoted

ENTRY = "main.py"
ANNOTATIONS = {"Given": "dict", "Values": "dict", "Outputs": "dict", "Tensors": "dict"}
OURS = "traceproof"


def solution(definition: Definition, truth: str, version: str | None) -> Solution:
    """The baseline of a definition by a truth. Raises Unemittable: none, or its code can not stand alone."""
    adapter = lookup.adapter(truth, definition)
    if adapter is None:
        raise Unemittable(f"{truth} has no adapter for {definition.name}")
    stack = STACKS[STACK_OF[truth]]
    package = f"{stack.distribution} {version}" if version else stack.distribution
    return Solution.model_validate(
        {
            "name": f"{truth}_wrapper_{definition.name}",
            "definition": definition.name,
            "author": BASELINE,
            "description": f"Calls {adapter.name} of {package}, as when the definition was verified.",
            "spec": {
                "language": "python",
                "target_hardware": ["cuda"] if adapter.sm else ["cpu", "cuda"],
                "entry_point": f"{ENTRY}::run",
                "dependencies": [stack.distribution],
                "destination_passing_style": False,
            },
            "sources": [{"path": ENTRY, "content": source(definition, adapter, stack)}],
        }
    )


def source(definition: Definition, adapter: Adapter, stack: Stack) -> str:
    """The Python file."""
    emitter = _Emitter(definition)
    _, named, *_ = inspect.signature(adapter.call).parameters  # an adapter may call the definition as it likes
    call = emitter.function(adapter.call, {named: definition, API: None})
    run = _entry(definition, adapter, call)
    emitter.modules.add("import torch")
    preparation = stack.preparation()
    prepare = "" if preparation is None else emitter.function(preparation, {})
    title = unquoted(f"{definition.name} by {stack.distribution}: {adapter.name}.")
    head = [
        f'"""{title}"""\n\nfrom __future__ import annotations',
        "\n".join([*sorted(emitter.modules), *sorted(emitter.imports)]),
        "\n".join(emitter.constants.values()),
    ]
    api = "\n".join(_import(stack.places(key), name) for key, name in emitter.api.items())
    parts = [*head, *emitter.functions.values()]
    if prepare:
        parts.append(f"{prepare}()")
    parts += [api, run]
    text = "\n\n\n".join(part for part in parts if part) + "\n"
    ast.parse(text)
    return text


def _import(places: tuple[str, ...], name: str) -> str:
    """An import of an API under a name, from the first place that has it."""
    lines = [f"from {place.replace(':', ' import ')} as {name}" for place in places]
    text = lines[-1]
    for line in reversed(lines[:-1]):
        text = f"try:\n    {line}\nexcept (ImportError, AttributeError):\n{textwrap.indent(text, '    ')}"
    return text


def _entry(definition: Definition, adapter: Adapter, call: str) -> str:
    """`run`, with the definition's parameters; returns its outputs in its order."""
    for name in definition.inputs:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise Unemittable(f"input {name!r} is no parameter")
    lines = [f"def run({', '.join(definition.inputs)}):"]
    if adapter.signature.rows is not None and (empty := _empty(definition, adapter.signature.rows)):
        lines += [f"    if not {adapter.signature.rows}.shape[0]:", f"        return {empty}"]
    pairs = ", ".join(f"{quoted(name)}: {name}" for name in definition.inputs)
    lines.append(f"    outputs = {call}({{{pairs}}})")
    lines.append("    return " + ", ".join(f"outputs[{quoted(name)}]" for name in definition.outputs))
    return "\n".join(lines)


def _empty(definition: Definition, rows: str) -> str:
    """What a call without rows returns; empty if an output would have elements."""
    places = {
        axis: f"{name}.shape[{index}]"
        for name, spec in reversed(definition.inputs.items())
        for index, axis in enumerate(spec.shape or ())
        if not spec.optional
    }
    none = (definition.inputs[rows].shape or ("",))[0]
    made = []
    for spec in definition.outputs.values():
        shape = spec.shape or ()
        if none not in shape:
            return ""
        sizes = [
            "0" if axis == none else str(definition.const_axes.get(axis, places.get(axis, ""))) for axis in shape
        ]
        if not all(sizes):
            return ""
        made.append(f"{rows}.new_empty(({', '.join(sizes)},), dtype=torch.{spec.dtype})")
    return ", ".join(made)


@dataclass
class _Emitter:
    """Collects what the emitted code needs."""

    definition: Definition
    api: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    _origins: dict[str, Any] = field(default_factory=dict)

    def function(self, function: Any, static: Mapping[str, Any]) -> str:  # noqa: ANN401 - a function or a class
        """Add a function (specialised) or a class; its name."""
        name = str(function.__name__)
        if self._claim(name, function):
            return name
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        module = vars(inspect.getmodule(function))
        partial = Partial(dict(static), module, self.api)
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []  # which ground truth it is
            node = partial.function(node)
            _annotate(node)
        self.functions[name] = ""  # holds the place in front of what it needs
        for called, arguments in partial.called.values():
            self.function(called, arguments)
        self.names(node, module)
        self.functions[name] = self.functions.pop(name) or ast.unparse(node)
        return name

    def _claim(self, name: str, origin: Any) -> bool:  # noqa: ANN401 - anything with a name
        """Whether a name is there already; the same name for two things can not be emitted."""
        known = self._origins.setdefault(name, origin)
        if known is not origin:
            raise Unemittable(f"two things are called {name}")
        return name in self.functions

    def names(self, node: ast.AST, module: Mapping[str, Any]) -> None:
        """Add what a piece of code reads of its module's globals, annotations included."""
        bound = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
        bound |= {
            item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
        }
        for item in ast.walk(node):
            if isinstance(item, ast.Name) and item.id not in bound and item.id in module:
                self._name(item.id, module[item.id], module)

    def _name(self, name: str, value: Any, module: Mapping[str, Any]) -> None:  # noqa: ANN401 - any global
        if name in self.functions or name in self.api.values() or value is torch:
            return
        home = getattr(value, "__module__", None) or ""
        if isinstance(value, FunctionType | type) and home.split(".")[0] == OURS:
            self.function(value, {})
        elif statements := [line for line in _imports(module["__name__"]).get(name, ()) if OURS not in line]:
            for line in statements:
                (self.imports if line.startswith("from ") else self.modules).add(line)
        elif (written := literal(value)) is not None:
            self.constants[name] = f"{name} = {ast.unparse(written)}"
        elif isinstance(value, frozenset):
            self.constants[name] = f"{name} = frozenset({sorted(value)!r})"
        else:
            raise Unemittable(f"{name} is neither code nor a plain value")


@cache
def _imports(module: str) -> dict[str, list[str]]:
    """The import statements behind each name that a module imports; `import a` and `import a.b` both bind `a`."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                one: ast.stmt = ast.Import([alias])
                if isinstance(node, ast.ImportFrom):
                    one = ast.ImportFrom(node.module, [alias], node.level)
                name = alias.asname or alias.name.partition(".")[0]
                found.setdefault(name, []).append(ast.unparse(one))
    return found


def _annotate(node: ast.FunctionDef) -> None:
    """Write this package's type names as what they stand for."""
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and item.id in ANNOTATIONS:
            item.id = ANNOTATIONS[item.id]
