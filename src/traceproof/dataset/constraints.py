"""Constraints: which names they use, whether they can hold, and sizes of axes that satisfy them."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from traceproof.dataset.definition import Definition

STEPS = 2_000  # assignments that a search tries
PROBED = (0, 1, 2, 1000, 4097)  # sizes at which an equality shows whether it is linear
SCANNED = 4096  # sizes that an equality with one unknown is tried on, if it is not linear
# Sizes tried where the wanted one violates a constraint: small ones, and those of tiles, pages and heads.
OTHERS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 576, 1024, 2048, 4096)
LARGEST = 1 << 24
BUILTINS = frozenset({"len", "min", "max", "abs", "sum", "all", "any", "int", "float", "bool", "math", "torch"})

Value = int | float | bool
Binary: Mapping[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
Compare: Mapping[type[ast.cmpop], Callable[[Value, Value], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def names(expression: str) -> frozenset[str]:
    """Names that the expression reads, those it binds itself (in a comprehension) left out; none if it is none."""
    found = [node for part in _parts(expression) for node in ast.walk(part) if isinstance(node, ast.Name)]
    return frozenset(node.id for node in found) - {node.id for node in found if isinstance(node.ctx, ast.Store)}


def parse(expression: str) -> ast.expr:
    """The syntax tree of an expression."""
    return ast.parse(expression.strip(), mode="eval").body


def allowed(definition: Definition, name: str) -> str | int | None:
    """What a constraint allows an input to be (`layout == 'HND'`, `mode in ('a', 'b')`, `kind == 2`), or None."""
    for node in (node for text in definition.constraints or () for node in ast.walk(parse(text))):
        match node:
            case ast.Compare(left=ast.Name(id=left), ops=[ast.Eq() | ast.In(), *_], comparators=[given, *_]):
                listed = given.elts if isinstance(given, ast.Tuple | ast.List | ast.Set) else [given]
                values = (one.value for one in listed if isinstance(one, ast.Constant))
                found = next((value for value in values if isinstance(value, str | int)), None)
                if left == name and found is not None:
                    return found
    return None


def text_of(definition: Definition, name: str) -> str | None:
    """A text that a constraint allows an input to be, or None."""
    found = allowed(definition, name)
    return found if isinstance(found, str) else None


class _Shapes(ast.NodeTransformer):
    """Put the axis a definition declares in place of `tensor.shape[i]`."""

    def __init__(self, definition: Definition) -> None:
        self.tensors = {**definition.inputs, **definition.outputs}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node:
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape")):
                index = evaluate(node.slice, {})
                shape = self.tensors[name].shape if name in self.tensors else None
                if shape and isinstance(index, int) and -len(shape) <= index < len(shape):
                    return ast.Name(shape[index], ast.Load())
        return self.generic_visit(node)


def with_axes(expression: str, definition: Definition) -> ast.expr:
    """The expression with every `tensor.shape[i]` replaced by the axis that stands there."""
    result = _Shapes(definition).visit(parse(expression))
    assert isinstance(result, ast.expr)
    return result


def says_the_same_twice(node: ast.expr) -> bool:
    """Whether the expression only compares things with themselves, by `==`, `<=` or `>=`."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return all(says_the_same_twice(value) for value in node.values)
    if not isinstance(node, ast.Compare):
        return False
    sides = [ast.dump(side) for side in (node.left, *node.comparators)]
    return len(set(sides)) == 1 and all(isinstance(op, (ast.Eq, ast.LtE, ast.GtE)) for op in node.ops)


def evaluate(node: ast.expr, axes: Mapping[str, int]) -> Value | None:
    """Value of an expression over axes; None where it needs something else, or has no value."""
    try:
        return _evaluate(node, axes)
    except (KeyError, ArithmeticError, RecursionError):
        return None


def _evaluate(node: ast.expr, axes: Mapping[str, int]) -> Value:  # noqa: PLR0911 - one return per node type
    """Like `evaluate`; raises KeyError: it needs what `axes` does not hold; ArithmeticError: it has no value."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name):
            return axes[name]
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
            value = _evaluate(operand, axes)
            return not value if isinstance(op, ast.Not) else -value
        case ast.BinOp() if type(node.op) in Binary:
            return Binary[type(node.op)](_evaluate(node.left, axes), _evaluate(node.right, axes))
        case ast.BoolOp(op=op, values=operands):
            return (all if isinstance(op, ast.And) else any)([bool(_evaluate(value, axes)) for value in operands])
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return _evaluate(body if _evaluate(test, axes) else otherwise, axes)
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Tuple() | ast.List() as among]):
            value = _evaluate(left, axes)
            return any(value == _evaluate(one, axes) for one in among.elts)
        case ast.Compare():
            sides = [_evaluate(side, axes) for side in (node.left, *node.comparators)]
            return all(map(operator.call, [Compare[type(op)] for op in node.ops], sides, sides[1:]))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_]):
            return (min if name == "min" else max)(_evaluate(argument, axes) for argument in node.args)
    raise KeyError(ast.dump(node))


def last_of(definition: Definition, indptr: str) -> str | None:
    """The axis that a constraint `axis == indptr[-1].item()` (either way round) ties to the input `indptr`."""
    last = re.compile(rf"(int\()*{re.escape(indptr)}\[-1\](\)|\.item\(\))*")
    for constraint in definition.constraints or ():
        match parse(constraint):
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                for axis, other in ((left, right), (right, left)):
                    known = isinstance(axis, ast.Name) and axis.id in definition.axes
                    if known and last.fullmatch(ast.unparse(other)):
                        return ast.unparse(axis)
    return None


def literal_axis(size: str) -> tuple[str, dict[str, Any]]:
    """The name and kind of an axis for a size in a shape: `32` is a const axis, any other name a var one."""
    if re.fullmatch(r"[0-9]{1,9}", size):
        return f"size_{int(size)}", {"type": "const", "value": int(size)}
    return size, {"type": "var"}


def determined(axes: Mapping[str, Any], constraints: Iterable[Any], note: Callable[[str], None]) -> dict[str, Any]:
    """The axes, a var one that constraints fix given the const ones being const."""
    sizes = {name: axis.get("value") for name, axis in axes.items() if isinstance(axis, dict)}
    const = {name: size for name, size in sizes.items() if type(size) is int and 0 <= size <= LARGEST}
    system = System(tuple(axes), tuple(text for text in constraints if isinstance(text, str)))
    fixed = system.completed(const)
    found = dict(axes)
    for name, size in fixed.items():
        if name not in const and isinstance(axes[name], dict) and axes[name].get("type") == "var":
            note(f"axes.{name} is var, and the constraints fix it: read as const, {size}")
            found[name] = {**axes[name], "type": "const", "value": size}
    return found


@dataclass(frozen=True)
class System:
    """Axes under constraints; one over anything but axes (a tensor, a mode), or without a value, takes no part."""

    axes: tuple[str, ...]
    constraints: tuple[str, ...]

    @cached_property
    def _usable(self) -> tuple[tuple[ast.expr, frozenset[str]], ...]:
        """Constraints with the axes that each speaks of, those joined by `and` taken apart."""
        found = []
        for node in (node for text in self.constraints for node in _parts(text)):
            names = frozenset(one.id for one in ast.walk(node) if isinstance(one, ast.Name)) - {"min", "max"}
            known = bool(names) and names <= set(self.axes)
            if known and any(evaluate(node, dict.fromkeys(names, size)) is not None for size in (0, 1, 2)):
                found.append((node, names))  # for some sizes it has a value
        return tuple(found)

    def completed(self, sizes: Mapping[str, int], *, scanned: int = SCANNED) -> dict[str, int]:
        """The sizes, with each axis that an equality fixes once the others of it are known.

        An equality that is not linear in its unknown is tried on as many sizes as `scanned` says.
        """
        known = dict(sizes)
        waiting = list(self._usable)
        while True:
            left = []
            for node, names in waiting:
                unknown = names - known.keys()
                name = next(iter(unknown), "")
                size = _solved(node, name, known, scanned) if len(unknown) == 1 else None
                if size is not None:
                    known[name] = size
                elif unknown:
                    left.append((node, names))
            if len(left) == len(waiting) or not left:
                return known
            waiting = left

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether no constraint that can be evaluated is false."""
        return not any(
            names <= sizes.keys() and evaluate(node, sizes) in {False, None} for node, names in self._usable
        )

    def stuck(self, sizes: Mapping[str, int]) -> bool:
        """Whether a linear equality has no whole size left for the only axis without one."""
        open_ones = ((node, names - sizes.keys()) for node, names in self._usable)
        found = (_linear(node, next(iter(names)), sizes) for node, names in open_ones if len(names) == 1)
        return any(size is not None and _size(size) is None for size in found)

    def listed(self, name: str, known: Mapping[str, int]) -> Iterator[int]:
        """Sizes by which `name in (head_dim, head_dim // 2)` states an axis, in the order written."""
        for node, names in self._usable:
            match node:
                case ast.Compare(left=ast.Name(id=left), ops=[ast.In()], comparators=[ast.Tuple(elts=among)]):
                    if left == name and {name} < names <= {name, *known}:
                        sizes = (evaluate(one, known) for one in among)
                        yield from (int(size) for size in sizes if size is not None)

    def solve(self, const: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int] | None:
        """A size for every axis that satisfies all constraints, as `const` or near `wanted`; None: none found."""
        found = _found(self, tuple(const.items()), tuple(wanted.items()))
        return None if found is None else dict(found)

    def order(self, known: Mapping[str, int]) -> tuple[str, ...]:
        """Axes without a size, those in the most constraints first; last, those that quotients of others give."""
        weight = {name: -sum(name in names for _, names in self._usable) for name in self.axes}
        for node, _ in self._usable:
            match node:
                case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[right]):
                    if any(isinstance(one, ast.FloorDiv) for one in ast.walk(right)):
                        weight[name] = 1
        return tuple(sorted((name for name in self.axes if name not in known), key=weight.__getitem__))


@lru_cache(maxsize=1024)  # the cases of a definition, and its `init`, ask for the same sizes many times over
def _found(
    system: System, const: tuple[tuple[str, int], ...], wanted: tuple[tuple[str, int], ...]
) -> Mapping[str, int] | None:
    near = dict(wanted)
    steps = iter(range(STEPS))

    def search(known: Mapping[str, int]) -> dict[str, int] | None:
        """All sizes, from the known ones on: of the most constrained axis the nearest to the wanted one first."""
        sizes = system.completed(known, scanned=0)
        if not system.holds(sizes) or system.stuck(sizes):
            return None
        free = system.order(sizes)
        if not free:
            return sizes
        name, size = free[0], near.get(free[0], 1)
        others = {*OTHERS, *(one for one in sizes.values() if one)} - {size}
        nearest = sorted(others, key=lambda one: (abs(one - size), one))
        for candidate in (size, *system.listed(name, sizes), *nearest):
            if next(steps, None) is None:
                return None
            if (found := search({**sizes, name: candidate})) is not None:
                return found
        return None

    return search(system.completed(dict(const)))


def _parts(text: str) -> Iterator[ast.expr]:
    """Expressions that `and` joins; none if it is none."""
    try:
        waiting = [parse(text)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            waiting += node.values
        else:
            yield node


def _difference(node: ast.expr) -> ast.BinOp | None:
    """What is 0 where an equality holds, left minus right; None: it is no equality."""
    match node:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return ast.BinOp(left, ast.Sub(), right)
    return None


def _solved(node: ast.expr, name: str, known: Mapping[str, int], scanned: int) -> int | None:
    """The only size of an axis that makes an equality true; None: it is no equality, or has none, or several."""
    linear, difference = _linear(node, name, known), _difference(node)
    if linear is not None or difference is None:
        return _size(linear)
    fitting = [size for size in range(scanned) if evaluate(difference, {**known, name: size}) == 0]
    return fitting[0] if len(fitting) == 1 else None


def _linear(node: ast.expr, name: str, known: Mapping[str, int]) -> float | None:
    """What solves an equality for one name, whole or not; None: it is no equality, or not linear in the name."""
    difference = _difference(node)
    if difference is None:
        return None
    for side, other in ((difference.left, difference.right), (difference.right, difference.left)):
        if isinstance(side, ast.Name) and side.id == name:
            return evaluate(other, known)
    at = {size: evaluate(difference, {**known, name: size}) for size in PROBED}
    start, slope = at[0] or 0, (at[1] or 0) - (at[0] or 0)
    if slope and all(value == start + slope * size for size, value in at.items()):
        return -start / slope
    return None


def _size(value: float | None) -> int | None:
    return int(value) if value is not None and value == int(value) and 0 <= value <= LARGEST else None
