"""Emits calls of ground truths as standalone code, from adapters, for baseline solutions and test files.

An adapter serves every definition of its form; its text is emitted for one of them. So an expression that the
definition decides (a size, a constant that its reference states) is replaced by its value, a branch that it
decides by the one taken, and the parameter `definition` is removed.
"""

import ast
import builtins
import inspect
import io
import keyword
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from types import FunctionType
from typing import Any, get_origin

from traceproof.dataset.definition import Definition
from traceproof.dataset.records import BASELINE, Solution
from traceproof.lazy import torch
from traceproof.ops import lookup
from traceproof.ops.adapter import scalar, tensor
from traceproof.stacks import STACK_OF, STACKS
from traceproof.text import literal as quoted
from traceproof.text import unquoted

ENTRY = "main.py"
OURS = "traceproof"


class Unemittable(Exception):  # noqa: N818 - not an error: an adapter without a standalone form
    """A part of the code, named by the message, that can not be separated from its definition."""


def solution(definition: Definition, truth: str, version: str | None) -> Solution:
    """The baseline of a definition: a truth's call. Raises Unemittable: none, or its code can not stand alone."""
    call = Call(definition, truth)
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


class Call:
    """A ground truth's call for one definition, as code.

    Raises Unemittable: there is no adapter, or its code can not stand alone.
    """

    def __init__(self, definition: Definition, truth: str) -> None:
        adapter = lookup.adapter(truth, definition)
        if adapter is None:
            raise Unemittable(f"{truth} has no adapter for {definition.name}")
        self.definition, self.adapter, self.stack = definition, adapter, STACKS[STACK_OF[truth]]
        self.constants: dict[str, str] = {}  # name -> assignment
        self.mappings: set[str] = set()  # this package's names for Mapping, used in annotations
        self.functions: dict[str, tuple[object, str]] = {}  # name -> (function, its text for this definition)
        set_ = "os.environ.setdefault({}, {})".format
        self.settings = [set_(quoted(name), quoted(value)) for name, value in self.stack.settings.items()]
        self.imports = {"import torch", *(["import os"] if self.settings else [])}
        names = {key: f"api_{key.rpartition(':')[2]}" for key in adapter.apis}
        self.apis = [_import(self.stack.places(key), name) for key, name in names.items()]
        self.apis.append(f"API = {{{', '.join(f'{quoted(key)}: {name}' for key, name in names.items())}}}")
        # the adapter's name for its parameter `definition`
        _, named, *_ = inspect.signature(adapter.call).parameters
        self._add(adapter.call, named)
        unbound = _unbound("\n".join([*self.head, *self.apis, *self.parts]))
        if unbound:
            raise Unemittable(f"{', '.join(sorted(unbound))} would be missing")

    @property
    def title(self) -> str:
        """Text such as `norm.rmsnorm of flashinfer-python`, fit for a docstring."""
        return unquoted(f"{self.adapter.name} of {self.stack.distribution}")

    @property
    def head(self) -> list[str]:
        """Imports of the standard library and of torch."""
        return sorted(self.imports, key=lambda line: (line.startswith("from"), line))

    @property
    def parts(self) -> list[str]:
        """Constants as one text, then functions, each after those that it calls."""
        aliases = [" = ".join([*sorted(self.mappings), "dict"])] if self.mappings else []
        constants = "\n".join([*aliases, *self.constants.values()])
        return [*filter(None, [constants]), *(text for _, text in self.functions.values())]

    def module(self) -> str:
        """A complete file: its `run` takes the inputs, and returns the outputs in the definition's order."""
        for name in self.definition.inputs:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise Unemittable(f"input {name!r} is no parameter")
        title = f'"""{unquoted(self.definition.name)} by {self.title}."""\n\nfrom __future__ import annotations\n'
        pairs = ", ".join(f"{quoted(name)}: {name}" for name in self.definition.inputs)
        returned = ", ".join(f"outputs[{quoted(name)}]" for name in self.definition.outputs)
        entry = f"def run({', '.join(self.definition.inputs)}):\n"
        entry += f"    outputs = {self.adapter.call.__name__}(API, {{{pairs}}})\n    return {returned}"
        texts = ["\n".join([title, *self.head]), "\n".join(self.settings), "\n".join(self.apis), *self.parts]
        text = "\n\n\n".join(filter(None, [*texts, folded(entry)])) + "\n"
        ast.parse(text)
        return text

    def function(self, name: str) -> str:
        """A function that imports the package and returns its call; the module around it must import torch."""
        lines = [*(line for line in self.head if line != "import torch"), *self.settings, *self.apis]
        last = f"return lambda **inputs: {self.adapter.call.__name__}(API, inputs)"
        body = "\n\n".join(["\n".join(lines), *self.parts, last])
        text = f'def {name}():\n    """{self.title}."""\n{textwrap.indent(body, "    ")}\n'
        ast.parse(text)
        return text

    def _add(self, function: Any, parameter: str = "definition") -> None:  # noqa: ANN401 - a function of ours
        """Add a function's text for the definition, its argument `parameter`, and all that the text needs."""
        name = function.__name__
        if name in self.functions:
            if self.functions[name][0] is not function:
                raise Unemittable(f"two things are called {name}")
            return
        written = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(written).body[0]
        if not isinstance(node, ast.FunctionDef):
            raise Unemittable(f"{name} is no function that has a text of its own")
        node.decorator_list, plain = [], "\n".join(written.splitlines()[node.lineno - 1 :])  # without decorators
        scope = {**vars(sys.modules[function.__module__]), **inspect.getclosurevars(function).nonlocals}
        node = _Filled(node, scope, {parameter: self.definition}).filled
        self.functions[name] = function, ""  # a placeholder, since it may call itself
        bound = set(_bound(node))
        for item in ast.walk(node):
            if isinstance(item, ast.Name) and item.id not in bound and item.id in scope:
                self._name(item.id, scope[item.id], scope["__name__"])
        del self.functions[name]  # to move it behind the functions that it calls
        unchanged = ast.dump(node) == ast.dump(ast.parse(plain).body[0])  # the definition decides nothing in it
        self.functions[name] = function, plain if unchanged else folded(ast.unparse(node))

    def _name(self, name: str, value: Any, module: str) -> None:  # noqa: ANN401 - any global
        """Add the import, constant or function that a name refers to in a module."""
        if value is torch:
            return
        if get_origin(value) in {Mapping, dict}:  # this package's name for them
            self.mappings.add(name)
        elif isinstance(value, FunctionType) and value.__module__.startswith(f"{OURS}."):
            self._add(value)
            if value.__name__ != name:  # behind the function, which it needs
                self.functions[name] = value, f"{name} = {value.__name__}"
        elif statements := [line for line in _imports(module).get(name, ()) if OURS not in line]:
            self.imports |= set(statements)
        else:
            written = f"frozenset({sorted(value)!r})" if isinstance(value, frozenset) else literal(value)
            if written is None:
                raise Unemittable(f"{name} is neither code nor a plain value")
            self.constants[name] = f"{name} = {written}"


def _import(places: tuple[str, ...], name: str) -> str:
    """An import of an API under a name; from each place in turn until one has it."""
    lines = [f"from {place.replace(':', ' import ')} as {name}" for place in places]
    text = lines[-1]
    for line in reversed(lines[:-1]):
        text = f"try:\n    {line}\nexcept (ImportError, AttributeError):\n{textwrap.indent(text, '    ')}"
    return text


@cache
def _imports(module: str) -> dict[str, list[str]]:
    """Import statements by the name that they bind in a module; `import a` and `import a.b` both bind `a`."""
    statements: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                statement: ast.stmt = ast.Import([alias])
                if isinstance(node, ast.ImportFrom):
                    statement = ast.ImportFrom(node.module, [alias], node.level)
                name = alias.asname or alias.name.partition(".")[0]
                statements.setdefault(name, []).append(ast.unparse(statement))
    return statements


class _Filled(ast.NodeTransformer):
    """A function, `node`, specialised for one definition.

    `scope` has its globals and closure variables, `known` the values of names that the definition decides; decided
    local variables are added.
    """

    def __init__(self, node: ast.FunctionDef, scope: dict[str, Any], known: dict[str, Any]) -> None:
        self.scope, self.known = scope, known
        self.bound = list(_bound(node))  # with repetitions
        for arguments in (node.args.args, node.args.kwonlyargs):
            arguments[:] = [argument for argument in arguments if argument.arg not in known]
        node.body = self.block(node.body)
        self.filled = ast.fix_missing_locations(node)

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The transformed statements, up to the first after which nothing runs."""
        done: list[ast.stmt] = []
        for statement in body:
            result = self.visit(statement)
            done += result if isinstance(result, list) else [result] if result is not None else []
            if done and isinstance(done[-1], ast.Return | ast.Raise):
                break
        return done or [ast.Pass()]

    def decided(self, node: ast.expr) -> bool:
        """Whether an expression depends on the definition alone."""
        bound_inside = set(_bound(node))
        read = {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and item.id not in bound_inside}
        known = self.known.keys() | ((self.scope.keys() | vars(builtins).keys()) - set(self.bound))
        return bool(read & self.known.keys()) and read <= known

    def value(self, node: ast.expr) -> Any:  # noqa: ANN401 - any value
        """The value of a decided expression."""
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<adapter>", "eval")
        return eval(code, {**self.scope, **self.known})  # noqa: S307 - this package's own code

    def visit(self, node: ast.AST) -> Any:  # noqa: ANN401 - ast's own signature
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Starred) and self.decided(node):
            value = self.value(node)
            # Of a mapping that is no literal, only the keys may be used.
            written = literal(value) or (literal(tuple(value)) if isinstance(value, Mapping) else None)
            if written is not None:
                return _expression(written)
        return super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and self.bound.count(target.id) == 1 and self.decided(node.value):
            self.known[target.id] = self.value(node.value)
            if literal(self.known[target.id]) is None:
                return None
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if self.decided(node.test):
            taken = node.body if self.value(node.test) else node.orelse
            return self.block(taken) if taken else []
        node.test, node.body = self.visit(node.test), self.block(node.body)
        node.orelse = self.block(node.orelse) if node.orelse else []
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:  # noqa: ANN401 - ast's own signature
        if self.decided(node.test):
            return self.visit(node.body if self.value(node.test) else node.orelse)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript | ast.Attribute) -> ast.AST:
        """Refuse a lookup in a mapping that can not be written as a literal."""
        value = self.value(node.value) if self.decided(node.value) else None
        if isinstance(value, Mapping) and not literal(value):
            raise Unemittable(ast.unparse(node))
        return self.generic_visit(node)

    visit_Attribute = visit_Subscript  # noqa: N815 - ast's own name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # Adapters check inputs since they serve any form; the emitted code just reads them.
        called = self.scope.get(node.func.id) if isinstance(node.func, ast.Name) else None
        read = "{}[{}]" if called is tensor else "float({}[{}])" if called is scalar else None
        if read is not None and not node.keywords:
            return _expression(read.format(*map(ast.unparse, node.args)))
        if isinstance(called, FunctionType) and called.__module__.startswith(f"{OURS}."):
            decided = {name for name, value in self.known.items() if isinstance(value, Definition)}
            node.args = [argument for argument in node.args if ast.unparse(argument) not in decided]
            node.keywords = [keyword for keyword in node.keywords if ast.unparse(keyword.value) not in decided]
        return self.generic_visit(node)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def literal(value: Any) -> str | None:  # noqa: ANN401 - any value
    """A value as the text of an expression; None: it has no literal."""
    try:
        return quoted(value, torch.dtype)
    except TypeError:
        return None


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a function binds: parameters and assigned variables."""
    for item in ast.walk(node):
        if isinstance(item, ast.arg):
            yield item.arg
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            yield item.id


def folded(text: str, width: int = 110) -> str:
    """Code with double quotes, and with long lines broken at commas in brackets, if it parses to the same tree."""
    rows = text.splitlines()
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type == tokenize.STRING and token.string[0] == "'" and not {'"', "\\"} & set(token.string):
            row, column = token.start
            line = rows[row - 1]
            rows[row - 1] = f'{line[:column]}"{token.string[1:-1]}"{line[token.end[1] :]}'
    done = "\n".join(part for line in rows for part in _folded(line, width))
    return done if ast.dump(ast.parse(done)) == ast.dump(ast.parse(text)) else text


def _folded(line: str, width: int) -> Iterator[str]:
    """A line, or several: the items of its longest bracket on separate lines."""
    longest = max(_brackets(line), key=lambda places: (places[-1] - places[0], places[0]), default=[0, 0])
    start, *inside, end = longest
    if len(line) <= width or end - start < width // 4 or '"""' in line:
        yield line
        return
    text = "".join(line[place] for place in inside)
    # commas separate items, not the targets of a comprehension or the parameters of a lambda
    listed = " for " not in text and "lambda" not in text
    commas = [place for place in inside if line[place] == ","] if listed else []
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    yield line[: start + 1]
    for before, after in pairwise([start, *commas, end]):
        item = line[before + 1 : after].strip()
        if item:
            yield from _folded(f"{indent}{item}{',' if commas else ''}", width)
    yield indent[4:] + line[end:]


def _brackets(line: str) -> Iterator[list[int]]:
    """Per pair of brackets outside of strings, the places of both and of the signs directly in them."""
    opened: list[list[int]] = []
    quote = ""
    for place, sign in enumerate(line):
        if sign in "\"'" and quote in {"", sign}:
            quote = "" if quote else sign
        elif not quote and sign in "([{":
            opened.append([place])
        elif not quote and opened:
            opened[-1].append(place)
            if sign in ")]}":
                yield opened.pop()


def _unbound(text: str) -> set[str]:
    """Names that code reads but never binds, so that it can not stand alone."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    named = (node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler))
    bound = {*dir(builtins), *_bound(tree), *named}
    aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    bound |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - bound
