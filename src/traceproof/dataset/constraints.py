"""Constraints: the names that they use, whether they can hold, and sizes of axes that satisfy them."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from traceproof.dataset.definition import Definition

STEPS = 2_000  # assignments that a search tries at most
PROBED = (0, 1, 2, 1000, 4097)  # sizes by which it is found out whether an equality is linear in an axis
# Sizes to try if the wanted one violates a constraint: small ones, and those of tiles, pages and heads.
OTHERS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 576, 1024, 2048, 4096)
LARGEST = 1 << 24
BUILTINS = frozenset({"len", "min", "max", "abs", "sum", "all", "any", "int", "float", "bool", "math", "torch"})
Value = int | float | bool
# Operators for sizes: they take numbers only, so an expression takes little time and memory and reads nothing.
OPERATORS: Mapping[type[ast.AST], Callable[..., Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def names(expression: str) -> frozenset[str]:
    """Names that an expression reads, without those that a comprehension in it binds; none if it is invalid."""
    used = [node for part in _parts(expression) for node in ast.walk(part) if isinstance(node, ast.Name)]
    return frozenset(node.id for node in used) - {node.id for node in used if isinstance(node.ctx, ast.Store)}


@lru_cache(maxsize=4096)  # those of a definition are read for each of its cases
def parse(expression: str) -> ast.expr:
    """The syntax tree of an expression, for reading alone. Raises SyntaxError: it is none."""
    return ast.parse(expression.strip(), mode="eval").body


def allowed(definition: Definition, name: str) -> str | int | None:
    """A value that constraints give an input (`layout == 'HND'`, `mode in ('a', 'b')`, `kind == 2`), or None."""
    for node in (node for text in definition.constraints or () for node in ast.walk(parse(text))):
        match node:
            case ast.Compare(left=ast.Name(id=compared), ops=[ast.Eq() | ast.In(), *_], comparators=[stated, *_]):
                choices = stated.elts if isinstance(stated, ast.Tuple | ast.List | ast.Set) else [stated]
                values = (choice.value for choice in choices if isinstance(choice, ast.Constant))
                first = next((value for value in values if isinstance(value, str | int)), None)
                if compared == name and first is not None:
                    return first
    return None


def text_of(definition: Definition, name: str) -> str | None:
    """A text that a constraint gives an input; None: none."""
    value = allowed(definition, name)
    return value if isinstance(value, str) else None


def with_axes(expression: str, definition: Definition) -> ast.expr:
    """The syntax tree of an expression, with each `tensor.shape[i]` replaced by its axis."""
    tensors = {**definition.inputs, **definition.outputs}

    def axis(match: re.Match[str]) -> str:
        shape, index = tensors[match[1]].shape if match[1] in tensors else None, int(match[2])
        return shape[index] if shape and -len(shape) <= index < len(shape) else match[0]

    return parse(re.sub(r"\b(\w+)\.shape\[\s*(-?\d+)\s*\]", axis, expression))


def broken(definition: Definition, sizes: Mapping[str, int]) -> str | None:
    """The first constraint that sizes beside those of const axes make false; None: none is."""
    known = {**definition.const_axes, **sizes}
    stated = definition.constraints or ()
    return next((text for text in stated if evaluate(with_axes(text, definition), known) is False), None)


def says_the_same_twice(node: ast.expr) -> bool:
    """Whether an expression only compares things with themselves, by `==`, `<=` or `>=`."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return all(says_the_same_twice(value) for value in node.values)
    if not isinstance(node, ast.Compare):
        return False
    sides = [ast.dump(side) for side in (node.left, *node.comparators)]
    return len(set(sides)) == 1 and all(isinstance(op, (ast.Eq, ast.LtE, ast.GtE)) for op in node.ops)


def evaluate(node: ast.expr, axes: Mapping[str, int]) -> Value | None:
    """The value of an expression over axes; None: it uses something else, or has no value."""
    try:
        return _evaluate(node, axes)
    except (KeyError, ArithmeticError, RecursionError):
        return None


def _evaluate(node: ast.expr, axes: Mapping[str, int]) -> Value:  # noqa: PLR0911 - one return per node type
    """As `evaluate`. Raises KeyError: it uses something that `axes` lacks; ArithmeticError: it has no value."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name):
            return axes[name]
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)](_evaluate(operand, axes))
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_evaluate(left, axes), _evaluate(right, axes))
        case ast.BoolOp(op=op, values=operands):
            return (all if isinstance(op, ast.And) else any)(bool(_evaluate(value, axes)) for value in operands)
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return _evaluate(body if _evaluate(test, axes) else otherwise, axes)
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Tuple() | ast.List() as among]):
            return _evaluate(left, axes) in [_evaluate(choice, axes) for choice in among.elts]
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_evaluate(side, axes) for side in (left, *others)]
            return all(map(operator.call, [OPERATORS[type(op)] for op in ops], sides, sides[1:]))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_], keywords=[]):
            return (min if name == "min" else max)(_evaluate(argument, axes) for argument in node.args)
    raise KeyError(ast.dump(node))


def last_of(definition: Definition, indptr: str) -> str | None:
    """The axis that a constraint such as `axis == indptr[-1].item()` ties to the input `indptr`; or None."""
    last = re.compile(rf"(int\()*{re.escape(indptr)}\[-1\](\)|\.item\(\))*")
    for constraint in definition.constraints or ():
        match parse(constraint):
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                for axis, end in ((left, right), (right, left)):
                    known = isinstance(axis, ast.Name) and axis.id in definition.axes
                    if known and last.fullmatch(ast.unparse(end)):
                        return ast.unparse(axis)
    return None


def literal_axis(size: str) -> tuple[str, dict[str, Any]]:
    """Name and JSON of the axis for a size in a shape: `32` gives a const axis, any other name a var one."""
    if re.fullmatch(r"[0-9]{1,9}", size):
        return f"size_{int(size)}", {"type": "const", "value": int(size)}
    return size, {"type": "var"}


def determined(axes: Mapping[str, Any], constraints: Iterable[Any], note: Callable[[str], None]) -> dict[str, Any]:
    """The axes; var ones that constraints and const axes fix become const. `note` gets a sentence about each."""
    sizes = {name: axis.get("value") for name, axis in axes.items() if isinstance(axis, dict)}
    const = {name: size for name, size in sizes.items() if type(size) is int and 0 <= size <= LARGEST}
    system = System(tuple(axes), tuple(text for text in constraints if isinstance(text, str)))
    fixed = system.completed(const)
    completed = dict(axes)
    var = {name for name, axis in axes.items() if isinstance(axis, dict) and axis.get("type") == "var"}
    for name, size in fixed.items():
        if name in var - const.keys() and _is_size(size):
            note(f"axes.{name} is var, and the constraints fix it: read as const, {size}")
            completed[name] = {**axes[name], "type": "const", "value": size}
    return completed


class Part(NamedTuple):
    """A constraint without `and`: syntax tree, its axes, and for an equality the difference of its sides."""

    node: ast.expr
    names: frozenset[str]
    difference: ast.BinOp | None

    def solved(self, name: str, known: Mapping[str, int]) -> float | None:
        """The size of axis `name` with which an equality holds; None: it is none, or not linear in that axis."""
        if self.difference is None:
            return None
        at = {size: evaluate(self.difference, {**known, name: size}) for size in PROBED}
        start, slope = at[0] or 0, (at[1] or 0) - (at[0] or 0)
        linear = slope and all(value == start + slope * size for size, value in at.items())
        return -start / slope if linear else None


@dataclass(frozen=True)
class System:
    """Axes under constraints; those over anything but axes (a tensor, a mode), or without a value, are ignored."""

    axes: tuple[str, ...]
    constraints: tuple[str, ...]

    @cached_property
    def _usable(self) -> tuple[Part, ...]:
        """The constraints as parts that can be evaluated for some sizes."""
        parts = []
        for node in (node for text in self.constraints for node in _parts(text)):
            names = frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name)) - {"min", "max"}
            known = bool(names) and names <= set(self.axes)
            if known and any(evaluate(node, dict.fromkeys(names, size)) is not None for size in (0, 1, 2)):
                match node:
                    case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                        difference: ast.BinOp | None = ast.BinOp(left, ast.Sub(), right)
                    case _:
                        difference = None
                parts.append(Part(node, names, difference))  # it has a value for some sizes
        return tuple(parts)

    @cached_property
    def quotients(self) -> frozenset[str]:
        """Axes that an equality gives as quotients of others: `tiles == n // 128`."""
        sides = [(part.difference.left, part.difference.right) for part in self._usable if part.difference]
        divided = [left for left, right in sides if any(isinstance(one, ast.FloorDiv) for one in ast.walk(right))]
        return frozenset(left.id for left in divided if isinstance(left, ast.Name))

    def completed(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes, completed by all axes that equalities fix, one after the other.

        A result that is no size (a fraction, a negative number) shows that the sizes contradict the constraints.
        """
        known = dict(sizes)
        waiting = list(self._usable)
        while True:
            unsolved = []
            for part in waiting:
                unknown = part.names - known.keys()
                name = next(iter(unknown), "")
                size = part.solved(name, known) if len(unknown) == 1 else None
                if size is not None:
                    known[name] = int(size) if size == int(size) else size  # type: ignore[assignment] # no size
                elif unknown:
                    unsolved.append(part)
            if len(unsolved) == len(waiting) or not unsolved:
                return known
            waiting = unsolved

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether all are sizes, and no constraint over them is false."""
        return all(map(_is_size, sizes.values())) and not any(
            part.names <= sizes.keys() and evaluate(part.node, sizes) in {False, None} for part in self._usable
        )

    def listed(self, name: str, known: Mapping[str, int]) -> Iterator[int]:
        """Sizes that a constraint such as `name in (head_dim, head_dim // 2)` lists, in its order."""
        for node, names, _ in self._usable:
            match node:
                case ast.Compare(left=ast.Name(id=left), ops=[ast.In()], comparators=[ast.Tuple(elts=among)]):
                    if left == name and {name} < names <= {name, *known}:
                        sizes = (evaluate(choice, known) for choice in among)
                        yield from (int(size) for size in sizes if size is not None)

    def solve(self, const: Mapping[str, int], near: Mapping[str, int]) -> dict[str, int] | None:
        """Sizes for all axes that satisfy the constraints: `const`, the rest close to `near`; None: none found."""
        sizes = _solved(self, tuple(const.items()), tuple(near.items()))
        return None if sizes is None else dict(sizes)


@lru_cache(maxsize=1024)  # the cases of a definition, and its `init`, ask for the same sizes many times
def _solved(
    system: System, const: tuple[tuple[str, int], ...], wanted: tuple[tuple[str, int], ...]
) -> Mapping[str, int] | None:
    """Sizes of all axes that satisfy the constraints, close to the wanted ones; None: not found in STEPS steps."""
    near = dict(wanted)
    steps = iter(range(STEPS))

    def search(known: Mapping[str, int]) -> dict[str, int] | None:
        """Sizes for all axes, given some; each axis tries sizes nearest to the wanted one first."""
        sizes = system.completed(known)
        if not system.holds(sizes):
            return None
        free = sorted((name for name in system.axes if name not in sizes), key=system.quotients.__contains__)
        if not free:
            return sizes
        name, size = free[0], near.get(free[0], 1)
        others = {*OTHERS, *(known_size for known_size in sizes.values() if known_size)} - {size}
        nearest = sorted(others, key=lambda other_size: (abs(other_size - size), other_size))
        for candidate in (size, *system.listed(name, sizes), *nearest):
            if next(steps, None) is None:
                return None
            if (solution := search({**sizes, name: candidate})) is not None:
                return solution
        return None

    return search(system.completed(dict(const)))


def _parts(text: str) -> Iterator[ast.expr]:
    """The expressions that `and` joins in a text; none if it is no expression."""
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


def _is_size(value: float) -> bool:
    return isinstance(value, int) and 0 <= value <= LARGEST
