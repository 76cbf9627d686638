"""A baseline solution: a ground-truth call in a file that stands alone, emitted from an adapter.

An adapter is written for every definition of its form; a baseline is for one. So whatever depends on the
definition alone (its sizes, its form, constants read off its reference) is computed here and put in place,
branches that it decides are folded, and the parameters that carried it are dropped.

Kept, since nothing else gives the same files: torch.fx and other tracers record calls of tensors and lose what an
adapter plans with Python numbers, and a template beside each adapter would be a second call that nobody verified.
"""

import ast
import builtins
import inspect
import keyword
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any, TypeGuard

from traceproof.dataset.definition import Definition
from traceproof.dataset.records import BASELINE, Solution
from traceproof.lazy import torch
from traceproof.ops import lookup
from traceproof.ops.adapter import Adapter
from traceproof.stacks import STACK_OF, STACKS, Stack
from traceproof.text import literal as quoted
from traceproof.text import unquoted

ENTRY = "main.py"
ANNOTATIONS = {"Given": "dict", "Values": "dict", "Outputs": "dict", "Tensors": "dict"}
OURS = "traceproof"
API = "api"
SCALARS = (bool, int, float, str, type(None))


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


class Unemittable(Exception):  # noqa: N818 - an answer: this adapter has no form that stands alone
    """A part of the code that can not be told apart from the definition it is called with; names the part."""


@dataclass
class Partial:
    """One function, specialised."""

    static: dict[str, Any]  # what is known of its parameters and locals
    module: Mapping[str, Any]  # globals of the function
    api: dict[str, str]  # API keys -> name in the emitted code; filled as they are met
    # functions of this package that the result calls, with the arguments that were dropped
    called: dict[str, tuple[FunctionType, dict[str, Any]]] = field(default_factory=dict)
    _locals: frozenset[str] = frozenset()

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """The function without its static parameters."""
        self._locals = frozenset(_bound(node))
        arguments = node.args
        arguments.args = [item for item in arguments.args if item.arg not in self.static]
        arguments.kwonlyargs = [item for item in arguments.kwonlyargs if item.arg not in self.static]
        node.body = self._block(node.body) or [ast.Pass()]
        return ast.fix_missing_locations(node)

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for statement in (part for whole in body for part in self._split(whole)):
            done += self._statement(statement)
            if done and isinstance(done[-1], ast.Return | ast.Raise):
                break
        return done

    def _split(self, node: ast.stmt) -> list[ast.stmt]:
        """`a, b = x, y` as two assignments where the definition decides one of them and not the other."""
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                own = {name for target in targets for name in _bound(target)}
                apart = own.isdisjoint(_free(node.value)) and any(map(self.decided, values))
                if apart and len(targets) == len(values):
                    return [ast.Assign([target], value) for target, value in zip(targets, values, strict=True)]
        return [node]

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.Delete():
                node.targets = [one for one in node.targets if getattr(one, "id", None) not in self.static]
                return [node] if node.targets else []
            case ast.Assign(targets=[target]) if self.decided(node.value):
                return self._assign(target, self.value(node.value), node)
            case ast.If() if self.decided(node.test):
                return self._block(node.body if self.value(node.test) else node.orelse)
            case ast.If() | ast.For() | ast.While() | ast.With():
                for name in ("test", "iter"):
                    if hasattr(node, name):
                        setattr(node, name, _Expressions(self).visit(getattr(node, name)))
                node.body = self._block(node.body)
                if not isinstance(node, ast.With):
                    node.orelse = self._block(node.orelse)
                else:
                    for item in node.items:
                        item.context_expr = _Expressions(self).visit(item.context_expr)
                return [node]
            case _:
                return [_Expressions(self).visit(node)]

    def _assign(self, target: ast.expr, value: Any, node: ast.Assign) -> list[ast.stmt]:  # noqa: ANN401 - any value
        written = literal(value)
        names = [target] if isinstance(target, ast.Name) else getattr(target, "elts", [])
        if not all(isinstance(name, ast.Name) for name in names):
            raise Unemittable(ast.unparse(node))
        values = [value] if isinstance(target, ast.Name) else list(value)
        self.static |= {name.id: item for name, item in zip(names, values, strict=True)}
        if written is None:
            return []
        return [ast.Assign(targets=[target], value=written)]

    def decided(self, node: ast.expr) -> bool:
        """Whether the definition decides an expression, and something of it can not be written down otherwise."""
        free = set(_free(node))
        if API in free or not free & self.static.keys():
            return False
        known = self.static.keys() | (self.module.keys() - self._locals) | vars(builtins).keys() - self._locals
        unwritten = any(literal(self.static[name]) is None for name in free & self.static.keys())
        return free <= known and (unwritten or isinstance(node, ast.Compare | ast.BoolOp | ast.JoinedStr))

    def value(self, node: ast.expr) -> Any:  # noqa: ANN401 - any value
        """What a decided expression comes to."""
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<adapter>", "eval")
        return eval(code, {**self.module, **self.static})  # noqa: S307 - this package's own code

    def key(self, node: ast.expr) -> str:
        """Name in the emitted code of `api[...]`."""
        if not isinstance(node, ast.Constant) and not self.decided(node) and API in set(_free(node)):
            raise Unemittable(ast.unparse(node))
        key = str(self.value(node))
        return self.api.setdefault(key, f"{API}_{key.rpartition(':')[2]}")

    def call(self, node: ast.Call) -> ast.Call:
        """A call of a function of this package: static arguments go, and the callee is specialised for them."""
        function = self._ours(node.func)
        if function is None:
            return node
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        if any(isinstance(item, ast.Starred) for item in node.args) and any(map(self._hidden, node.args)):
            raise Unemittable(ast.unparse(node))
        named = [*zip(names, node.args, strict=False), *((one.arg, one.value) for one in node.keywords if one.arg)]
        gone = {name: self.static.get(value.id) for name, value in named if self._hidden(value)}
        kept = [argument for argument in node.args if not self._hidden(argument)]
        keywords = [keyword for keyword in node.keywords if not (keyword.arg and self._hidden(keyword.value))]
        before = self.called.setdefault(ast.unparse(node.func), (function, gone))
        if before != (function, gone):
            raise Unemittable(f"{ast.unparse(node.func)} is called for two things")
        return ast.Call(node.func, kept, keywords)

    def _ours(self, node: ast.expr) -> FunctionType | None:
        """The function of this package that a name means."""
        found = self.module.get(node.id) if isinstance(node, ast.Name) and node.id not in self._locals else None
        return found if isinstance(found, FunctionType) and found.__module__.startswith("traceproof.") else None

    def _hidden(self, node: ast.expr) -> TypeGuard[ast.Name]:
        """Whether an argument is a static value that can not be written."""
        if not isinstance(node, ast.Name):
            return False
        return node.id == API or (node.id in self.static and literal(self.static[node.id]) is None)


class _Expressions(ast.NodeTransformer):
    """Replaces the largest decided parts of expressions."""

    def __init__(self, partial: Partial) -> None:
        self._partial = partial

    def visit(self, node: ast.AST) -> Any:  # noqa: ANN401 - ast's own signature
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name) and self._partial.decided(node):
            written = literal(self._partial.value(node))
            if written is not None:
                return written
        return super().visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == API:
            return ast.Name(self._partial.key(node.slice), ast.Load())
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if self._partial.decided(node.test):
            chosen = node.body if self._partial.value(node.test) else node.orelse
            folded: ast.AST = self.visit(chosen)
            return folded
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.generic_visit(self._partial.call(node))

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        node.iter = self._names(node.iter)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        node.comparators = [self._names(item) for item in node.comparators]
        return self.generic_visit(node)

    def _names(self, node: ast.expr) -> ast.expr:
        """Of a decided mapping, its keys: all that iterating over it or asking for a member needs."""
        if self._partial.decided(node):
            value = self._partial.value(node)
            if isinstance(value, Mapping):
                return literal(tuple(value)) or node
        return node


def literal(value: Any) -> ast.expr | None:  # noqa: ANN401 - any value
    """A value as an expression; None: it has no plain one."""
    if type(value) is float and not math.isfinite(value):
        return ast.parse(f"float({str(value)!r})", mode="eval").body
    if type(value) in SCALARS:
        return ast.Constant(value)
    if isinstance(value, torch.dtype):
        return ast.parse(str(value), mode="eval").body
    if type(value) in {tuple, list}:
        items = [literal(item) for item in value]
        known = [item for item in items if item is not None]
        kind = ast.Tuple if type(value) is tuple else ast.List
        return kind(known, ast.Load()) if len(known) == len(items) else None
    if type(value) is dict:
        keys, values = literal(list(value)), literal(list(value.values()))
        if isinstance(keys, ast.List) and isinstance(values, ast.List):
            return ast.Dict(list(keys.elts), values.elts)
    return None


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a function binds: parameters and assigned ones."""
    for item in ast.walk(node):
        if isinstance(item, ast.arg):
            yield item.arg
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            yield item.id


def _free(node: ast.AST) -> Iterator[str]:
    """Names that an expression reads and does not bind itself."""
    own = set(_bound(node))
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and item.id not in own:
            yield item.id
