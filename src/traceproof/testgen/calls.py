"""Calls of ground truths as code that stands alone, emitted from adapters, for baseline solutions and test files.

An adapter is written for every definition of its form; what is emitted is for one. So whatever depends on the
definition alone (its sizes, its form, constants read off its reference) is computed here and put in place,
branches that it decides are folded, and the parameters that carried it are dropped.

Kept, since nothing else gives the same files: torch.fx and other tracers record calls of tensors and lose what an
adapter plans with Python numbers, and a template beside each adapter would be a second call that nobody verified.
"""

import ast
import builtins
import inspect
import io
import keyword
import math
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any, get_origin

from traceproof.dataset.definition import Definition
from traceproof.dataset.records import BASELINE, Solution
from traceproof.lazy import torch
from traceproof.ops import lookup
from traceproof.ops.adapter import Adapter, scalar, tensor
from traceproof.stacks import STACK_OF, STACKS, Stack
from traceproof.text import literal as quoted
from traceproof.text import unquoted

ENTRY = "main.py"
ALIASES = {"Given": "dict", "Outputs": "dict"}  # our names of mappings
OURS = "traceproof"
API = "api"
# Of a mapping they see the keys.
OVER_KEYS = frozenset({"zip", "list", "tuple", "set", "sorted", "enumerate", "len"})
SCALARS = (bool, int, float, str, type(None))


def solution(definition: Definition, truth: str, version: str | None) -> Solution:
    """The baseline of a definition by a truth. Raises Unemittable: none, or its code can not stand alone."""
    call = Call.of(definition, truth)
    package = f"{call.stack.distribution} {version}" if version else call.stack.distribution
    return Solution.model_validate(
        {
            "name": f"{truth}_wrapper_{definition.name}",
            "definition": definition.name,
            "author": BASELINE,
            "description": f"Calls {call.adapter.name} of {package}, as when the definition was verified.",
            "spec": {
                "language": "python",
                "target_hardware": ["cuda"] if call.adapter.sm else ["cpu", "cuda"],
                "entry_point": f"{ENTRY}::run",
                "dependencies": [call.stack.distribution],
                "destination_passing_style": False,
            },
            "sources": [{"path": ENTRY, "content": call.module()}],
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A ground truth's call of one definition, as code."""

    definition: Definition
    adapter: Adapter
    stack: Stack
    imports: tuple[str, ...]  # of the standard library and of torch
    apis: tuple[str, ...]  # of the package
    parts: tuple[str, ...]  # constants in one piece, functions and classes
    call: str  # the function that takes inputs by name and gives outputs by name

    @classmethod
    def of(cls, definition: Definition, truth: str) -> "Call":
        """Emit it. Raises Unemittable: there is no adapter, or its code can not stand alone."""
        adapter = lookup.adapter(truth, definition)
        if adapter is None:
            raise Unemittable(f"{truth} has no adapter for {definition.name}")
        stack = STACKS[STACK_OF[truth]]
        emitter = _Emitter(definition)
        _, named, *_ = inspect.signature(adapter.call).parameters  # an adapter may call the definition as it likes
        call = emitter.function(adapter.call, {named: definition, API: None})
        parts = ["\n".join(emitter.constants.values()), *emitter.functions.values()]
        parts = [*filter(None, parts)]
        imports = (*sorted(emitter.modules | {"import torch"}), *sorted(emitter.imports))
        apis = tuple(_import(stack.places(key), name) for key, name in emitter.api.items())
        unbound = _unbound("\n".join([*imports, *apis, *parts]))
        if unbound:
            raise Unemittable(f"{', '.join(sorted(unbound))} would be missing")
        return cls(
            definition=definition,
            adapter=adapter,
            stack=stack,
            imports=imports,
            apis=apis,
            parts=tuple(parts),
            call=call,
        )

    @property
    def title(self) -> str:
        """`norm.rmsnorm of flashinfer-python`, fit for a docstring."""
        return unquoted(f"{self.adapter.name} of {self.stack.distribution}")

    @property
    def head(self) -> tuple[list[str], list[str]]:
        """Import lines, and lines that set what the package reads of the environment."""
        settings = [f"os.environ.setdefault({quoted(k)}, {quoted(v)})" for k, v in self.stack.settings.items()]
        imports = {*self.imports, *(["import os"] if settings else [])}
        return sorted(imports, key=lambda line: (line.startswith("from"), line)), settings

    def module(self) -> str:
        """A file of its own."""
        imports, settings = self.head
        head = f'"""{unquoted(self.definition.name)} by {self.title}."""\n\nfrom __future__ import annotations\n'
        texts = ["\n".join([head, *imports]), "\n".join(settings), "\n".join(self.apis), *self.parts]
        texts.append(_entry(self.definition, self.adapter, self.call))
        text = "\n\n\n".join(filter(None, texts)) + "\n"
        ast.parse(text)
        return text

    def function(self, name: str) -> str:
        """A function that imports the package and returns the call; the module around it imports torch."""
        imports, settings = self.head
        own = "\n".join([*(line for line in imports if line != "import torch"), *settings, *self.apis])
        body = "\n\n".join([*filter(None, [own]), *self.parts, f"return lambda **inputs: {self.call}(inputs)"])
        text = f'def {name}():\n    """{self.title}."""\n{textwrap.indent(body, "    ")}\n'
        ast.parse(text)
        return text


def folded(text: str, width: int = 110) -> str:
    """Code with double quotes, and long lines broken at the commas of their brackets, where that can be done."""
    rows = text.splitlines()
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type == tokenize.STRING and token.string[0] == "'" and not {'"', "\\"} & set(token.string):
            row, column = token.start
            line = rows[row - 1]
            rows[row - 1] = f'{line[:column]}"{token.string[1:-1]}"{line[token.end[1] :]}'
    done = "\n".join(part for line in rows for part in _folded(line, width))
    return done if ast.dump(ast.parse(done)) == ast.dump(ast.parse(text)) else text


def _folded(line: str, width: int) -> Iterator[str]:
    """A line, or the items of its longest bracket on lines of their own."""
    opened: list[tuple[int, list[int], list[str]]] = []  # where brackets open, their commas, and their own text
    closed: list[tuple[int, int, int, list[int], str]] = []
    quote = ""
    for place, sign in enumerate(line):
        if sign in "\"'" and quote in {"", sign}:
            quote = "" if quote else sign
        elif not quote and sign in "([{":
            opened.append((place, [], []))
        elif not quote and sign in ")]}" and opened:
            begun, commas, texts = opened.pop()
            closed.append((place - begun, begun, place, commas, "".join(texts)))
        elif not quote and opened:
            opened[-1][2].append(sign)
            if sign == ",":
                opened[-1][1].append(place)
    size, start, end, commas, own = max(closed, default=(0, 0, 0, [], ""))
    if len(line) <= width or size < width // 4 or '"""' in line:
        yield line
        return
    listed = bool(commas) and " for " not in own and "lambda" not in own  # else its commas may be those of targets
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    yield line[: start + 1]
    for one, other in pairwise([start, *(commas if listed else ()), end]):
        item = line[one + 1 : other].strip()
        if item:
            yield from _folded(f"{indent}{item}{',' if listed else ''}", width)
    yield indent[4:] + line[end:]


def _unbound(text: str) -> set[str]:
    """Names that code reads and nowhere binds: what was told apart from its surroundings and still needs them."""
    nodes = list(ast.walk(ast.parse(text)))
    bound = {*dir(builtins), *(name for node in nodes for name in _bound(node))}
    bound |= {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name
    }
    aliases = [one for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names]
    bound |= {one.asname or one.name.partition(".")[0] for one in aliases}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - bound


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
    return folded("\n".join(lines))


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
        written = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(written).body[0]
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []  # which ground truth it is
        module = vars(inspect.getmodule(function))
        if isinstance(function, FunctionType):
            module = {**module, **inspect.getclosurevars(function).nonlocals}
        before = ast.dump(node)
        node = _Plain(module := dict(module)).visit(node)
        partial = Partial(dict(static), module, self.api)
        as_written = True
        if isinstance(node, ast.FunctionDef):
            written = "".join(written.splitlines(keepends=True)[node.lineno - 1 :]).rstrip()
            node = partial.function(node)
            as_written = ast.dump(node) == before
        self.functions[name] = ""  # holds the place in front of what it needs
        for called, arguments in partial.called.values():
            self.function(called, arguments)
        self.names(node, module)
        text = written.rstrip() if as_written else folded(ast.unparse(node))
        for alias in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}:
            plain = get_origin(module.get(alias))  # our name of a generic type: what it is an alias of
            text = text if plain is None else re.sub(rf"\b{alias}\b", ALIASES.get(alias, plain.__name__), text)
        self.functions[name] = self.functions.pop(name) or text
        return name

    def _claim(self, name: str, origin: Any) -> bool:  # noqa: ANN401 - anything with a name
        """Whether a name is there already; the same name for two things can not be emitted."""
        known = self._origins.setdefault(name, origin)
        if known is not origin:
            raise Unemittable(f"two things are called {name}")
        return name in self.functions

    def names(self, node: ast.AST, module: Mapping[str, Any]) -> None:
        """Add what a piece of code reads of its module's globals."""
        bound = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
        bound |= {
            item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
        }
        for item in ast.walk(node):
            if isinstance(item, ast.Name) and item.id not in bound and item.id in module:
                self._name(item.id, module[item.id], module)

    def _name(self, name: str, value: Any, module: Mapping[str, Any]) -> None:  # noqa: ANN401 - any global
        if name in self.functions or name in self.api.values() or value is torch or get_origin(value) is not None:
            return
        home = getattr(value, "__module__", None) or ""
        if isinstance(value, FunctionType | type) and home.split(".")[0] == OURS:
            self.function(value, {})
            if value.__name__ != name:
                self.functions[name] = f"{name} = {value.__name__}"
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
        function = self.ours(node.func)
        if function is None:
            return node
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        if any(isinstance(item, ast.Starred) for item in node.args) and any(map(self._hidden, node.args)):
            raise Unemittable(ast.unparse(node))
        named = [*zip(names, node.args, strict=False), *((one.arg, one.value) for one in node.keywords if one.arg)]
        gone = {
            name: None if isinstance(value, ast.Name) and value.id == API else self.value(value)
            for name, value in named
            if self._hidden(value)
        }
        kept = [argument for argument in node.args if not self._hidden(argument)]
        keywords = [keyword for keyword in node.keywords if not (keyword.arg and self._hidden(keyword.value))]
        before = self.called.setdefault(ast.unparse(node.func), (function, gone))
        if before != (function, gone):
            raise Unemittable(f"{ast.unparse(node.func)} is called for two things")
        return ast.Call(node.func, kept, keywords)

    def ours(self, node: ast.expr) -> FunctionType | None:
        """The function of this package that a name means."""
        found = self.module.get(node.id) if isinstance(node, ast.Name) and node.id not in self._locals else None
        return found if isinstance(found, FunctionType) and found.__module__.startswith("traceproof.") else None

    def _hidden(self, node: ast.expr) -> bool:
        """Whether an argument is the API, or a value that the definition decides and that can not be written."""
        if isinstance(node, ast.Name):
            return node.id == API or (node.id in self.static and literal(self.static[node.id]) is None)
        return self.decided(node) and literal(self.value(node)) is None


class _Plain(ast.NodeTransformer):
    """Writes `module.name` of a module of this package as `name`, and adds that to the names that code reads."""

    def __init__(self, module: dict[str, Any]) -> None:
        self._module = module

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        found = self._module.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if not (isinstance(found, ModuleType) and found.__name__.startswith(f"{OURS}.")):
            return self.generic_visit(node)
        self._module[node.attr] = getattr(found, node.attr)
        return ast.Name(node.attr, node.ctx)


class _Expressions(ast.NodeTransformer):
    """Replaces the largest decided parts of expressions."""

    def __init__(self, partial: Partial) -> None:
        self._partial = partial

    def visit(self, node: ast.AST) -> Any:  # noqa: ANN401 - ast's own signature
        if (
            isinstance(node, ast.expr)
            and not isinstance(node, ast.Name | ast.Starred)
            and self._partial.decided(node)
        ):
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
        # What checks an input, since an adapter may serve any form, becomes what reads it.
        called = self._partial.ours(node.func)
        read = "{}[{}]" if called is tensor else "float({}[{}])" if called is scalar else None
        if read is not None and not node.keywords:
            return ast.parse(read.format(*map(ast.unparse, node.args)), mode="eval").body
        if isinstance(node.func, ast.Name) and node.func.id in OVER_KEYS:
            node.args = [self._names(argument) for argument in node.args]
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
