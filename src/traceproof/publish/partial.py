"""Evaluate what an adapter's code says of one definition, and leave the rest as code.

An adapter is written for every definition of its form; a baseline is for one. So whatever depends on the
definition alone (its sizes, its form, constants read off its reference) is computed here and put in place,
branches that it decides are folded, and the parameters that carried it are dropped.

Kept, since nothing else gives the same files: torch.fx and other tracers record calls of tensors and lose what an
adapter plans with Python numbers, and a template beside each adapter would be a second call that nobody verified.
"""

import ast
import builtins
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

API = "api"
SCALARS = (bool, int, float, str, type(None))


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
                node.targets = [item for item in node.targets if not self._dropped(item)]
                return [node] if node.targets else []
            case ast.Assign(targets=[target]) if self.decided(node.value):
                return self._assign(target, self.value(node.value), node)
            case ast.If() if self.decided(node.test):
                return self._block(node.body if self.value(node.test) else node.orelse)
            case ast.If() | ast.For() | ast.While() | ast.With():
                for name in ("test", "iter"):
                    if hasattr(node, name):
                        setattr(node, name, self._expression(getattr(node, name)))
                node.body = self._block(node.body)
                if not isinstance(node, ast.With):
                    node.orelse = self._block(node.orelse)
                else:
                    for item in node.items:
                        item.context_expr = self._expression(item.context_expr)
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

    def _dropped(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.static

    def _expression(self, node: ast.expr) -> ast.expr:
        changed: ast.expr = _Expressions(self).visit(node)
        return changed

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
        gone = {name: self._static(value) for name, value in named if self._hidden(value)}
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

    def _hidden(self, node: ast.expr) -> bool:
        """Whether an argument is a static value that can not be written."""
        if not isinstance(node, ast.Name):
            return False
        return node.id == API or (node.id in self.static and literal(self.static[node.id]) is None)

    def _static(self, node: ast.expr) -> Any:  # noqa: ANN401 - any value
        assert isinstance(node, ast.Name)
        return None if node.id == API else self.static[node.id]


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
