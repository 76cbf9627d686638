"""One small change a mutant, over the syntax tree of a reference.

Assertions and docstrings are taken out first: a mutant that an assertion stops says nothing about the judge.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Each for the other.
PAIRS: tuple[tuple[Any, Any], ...] = (
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod)),
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
)
SWAPPED: dict[type[ast.AST], Any] = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
LOWER_DTYPE = {"float32": "bfloat16", "float64": "float16", "bfloat16": "float16"}
NAMES = """
max:min min:max amax:amin softmax:log_softmax logsumexp:amax sum:mean mean:sum sigmoid:tanh softplus:relu
relu:abs exp:expm1 rsqrt:sqrt log:log1p argmax:argmin zeros:ones repeat_interleave:repeat cumsum:cumprod
"""
SWAPPED_NAMES = dict(pair.split(":") for pair in NAMES.split())
DROPPED = frozenset({"transpose", "permute", "flip", "squeeze", "masked_fill_"})  # methods
Edit = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Change:
    """What to do to a node: kind, words, the edit, and the line that it changes (0: the node's own)."""

    operator: str
    what: str
    edit: Edit
    line: int = 0


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed reference."""

    operator: str  # the kind of change
    line: int  # of the reference as `ast.unparse` writes it, assertions left out
    what: str  # the change in words
    source: str  # the whole code


def plain(source: str) -> ast.Module:
    """The syntax tree without assertions and docstrings, with line numbers of its own text."""
    tree = _Strip().visit(ast.parse(source))
    return ast.parse(ast.unparse(ast.fix_missing_locations(tree)))


class _Strip(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST | None:
        """An assertion becomes `pass`: a block may hold nothing else."""
        return ast.copy_location(ast.Pass(), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """A string that stands alone says nothing to the machine."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.copy_location(ast.Pass(), node) if is_text else node


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants, in the order of the code."""
    tree = plain(source)
    nodes = list(ast.walk(tree))
    seen = {ast.unparse(tree)}
    for index, node in enumerate(nodes):
        for change in _edits(node):
            changed = copy.deepcopy(tree)
            change.edit(list(ast.walk(changed))[index])
            text = ast.unparse(ast.fix_missing_locations(changed))
            if text not in seen:
                seen.add(text)
                line = change.line or getattr(node, "lineno", 0)
                yield Mutant(change.operator, line, change.what, text)


def _edits(node: ast.AST) -> Iterator[Change]:
    for kinds, edits in EDITS:
        if isinstance(node, kinds):
            yield from edits(node)


def _constant(node: Any) -> Iterator[Change]:  # noqa: ANN401 - the node type that EDITS says
    value = node.value
    if isinstance(value, bool):
        yield Change("constant", f"{value} -> {not value}", _set("value", not value))
    elif isinstance(value, int | float):
        for other in _near(value):
            yield Change("constant", f"{value} -> {other}", _set("value", other))


def _operator(node: Any) -> Iterator[Change]:  # noqa: ANN401
    name = type(node.op).__name__
    if kind := SWAPPED.get(type(node.op)):
        yield Change("operator", f"{name} -> {kind.__name__}", _set("op", kind()))
    if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult):
        yield Change("operands", f"operands of {name} swapped", _swap_operands)
    if isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield Change("operator", f"{name} dropped", _drop_unary)


def _comparison(node: Any) -> Iterator[Change]:  # noqa: ANN401
    if len(node.ops) == 1 and (kind := SWAPPED.get(type(node.ops[0]))):
        yield Change("comparison", f"{type(node.ops[0]).__name__} -> {kind.__name__}", _set("ops", [kind()]))


def _attribute(node: Any) -> Iterator[Change]:  # noqa: ANN401
    for operator, table in (("dtype", LOWER_DTYPE), ("function", SWAPPED_NAMES)):
        if node.attr in table:
            yield Change(operator, f"{node.attr} -> {table[node.attr]}", _set("attr", table[node.attr]))
    if node.attr == "T":
        yield Change("axes", ".T dropped", _set("attr", "mT.mT"))


def _near(number: float) -> tuple[float, ...]:
    if isinstance(number, int):
        return (number + 1, number - 1) if number else (1,)
    return (number * 2, number * 1.1) if number else (1.0,)


def _set(field: str, value: object) -> Edit:
    return lambda node: setattr(node, field, value)


def _swap_operands(node: Any) -> None:  # noqa: ANN401
    node.left, node.right = node.right, node.left


def _drop_unary(node: Any) -> None:  # noqa: ANN401
    node.op = ast.UAdd() if isinstance(node.op, ast.USub) else node.op
    if isinstance(node.op, ast.Not | ast.Invert):
        inner = copy.deepcopy(node)
        node.operand = inner  # applied twice is not applied


def _slice_edits(node: Any) -> Iterator[Change]:  # noqa: ANN401
    for end in ("lower", "upper"):
        bound = getattr(node, end)
        if bound is not None:
            text = ast.unparse(bound)
            shifted = ast.BinOp(copy.deepcopy(bound), ast.Add(), ast.Constant(1))
            yield Change("slice", f"{end} {text} -> {text} + 1", _set(end, shifted))
            yield Change("slice", f"{end} {text} dropped", _set(end, None))


def _call_edits(node: Any) -> Iterator[Change]:  # noqa: ANN401
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "range":
        yield Change("loop", "one turn less", _fewer_turns)
    if len(node.args) == 2 and name not in {"range", "getattr", "isinstance"}:
        yield Change("operands", f"arguments of {name} swapped", lambda call: call.args.reverse())
    if isinstance(node.func, ast.Attribute) and name in DROPPED:
        yield Change("call", f".{name}() dropped", _drop_method)


def _fewer_turns(node: Any) -> None:  # noqa: ANN401
    end = -1 if len(node.args) < 3 else 1
    node.args[end] = ast.BinOp(node.args[end], ast.Sub(), ast.Constant(1))


def _drop_method(node: Any) -> None:  # noqa: ANN401
    """`x.name(...)` becomes `x.detach()`, which is x, and evaluates x once: it may be a draw."""
    node.func.attr = "detach"
    node.args, node.keywords = [], []


def _block_edits(node: Any) -> Iterator[Change]:  # noqa: ANN401
    body: list[ast.stmt] = node.body
    for place, statement in enumerate(body):
        droppable = isinstance(statement, ast.Expr | ast.AugAssign | ast.Continue | ast.For | ast.If)
        stores = isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name | ast.Tuple)
        if droppable or stores or _reassigns(statement):
            what = f"line {statement.lineno} dropped: {ast.unparse(statement)[:60]!r}"
            yield Change("statement", what, _drop(place), statement.lineno)


def _reassigns(statement: ast.stmt) -> bool:
    """`x = f(x)`: without it x still has a value."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
        return False
    name = statement.targets[0].id
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement.value))


def _drop(place: int) -> Edit:
    def edit(node: Any) -> None:  # noqa: ANN401
        node.body[place] = ast.copy_location(ast.Pass(), node.body[place])

    return edit


EDITS: tuple[tuple[tuple[type[ast.AST], ...], Callable[[Any], Iterator[Change]]], ...] = (
    ((ast.Constant,), _constant),
    ((ast.BinOp, ast.UnaryOp), _operator),
    ((ast.Compare,), _comparison),
    ((ast.Slice,), _slice_edits),
    ((ast.Attribute,), _attribute),
    ((ast.Call,), _call_edits),
    ((ast.FunctionDef, ast.For, ast.If, ast.While, ast.With), _block_edits),
)
