"""Constraints: which names they use, and whether they can ever be false."""

import ast
import operator
from collections.abc import Callable, Mapping

from traceproof.dataset.definition import Definition

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
    """Names that the expression reads, those it binds itself (in a comprehension) left out."""
    nodes = [node for node in ast.walk(parse(expression)) if isinstance(node, ast.Name)]
    bound = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    return frozenset(node.id for node in nodes) - bound


def parse(expression: str) -> ast.expr:
    """The syntax tree of an expression that the definition's model already accepted."""
    return ast.parse(expression, mode="eval").body


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
    """Like `evaluate`.

    Raises:
        KeyError: the expression needs something that `axes` does not hold.
        ArithmeticError: it divides by zero or overflows a float.
    """
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
        case ast.Compare():
            return _compared(node, axes)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_]):
            return (min if name == "min" else max)(_evaluate(argument, axes) for argument in node.args)
    raise KeyError(ast.dump(node))


def _compared(node: ast.Compare, axes: Mapping[str, int]) -> bool:
    """Value of a comparison; raises as `_evaluate`, a KeyError where it is none of numbers."""
    match node:
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Tuple() | ast.List() as among]):
            value = _evaluate(left, axes)
            return any(value == _evaluate(one, axes) for one in among.elts)
    sides = [_evaluate(side, axes) for side in (node.left, *node.comparators)]
    compared = [Compare[type(op)] for op in node.ops]
    return all(map(operator.call, compared, sides, sides[1:]))


def last_of(definition: Definition, indptr: str) -> str | None:
    """The axis that a constraint `axis == indptr[-1].item()` (either way round) ties to the input `indptr`."""
    for constraint in definition.constraints or ():
        node = parse(constraint)
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq)):
            continue
        sides = (node.left, node.comparators[0])
        for axis, other in (sides, sides[::-1]):
            if isinstance(axis, ast.Name) and axis.id in definition.axes and _is_last(other, indptr):
                return axis.id
    return None


def _is_last(node: ast.expr, name: str) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[]):
            return _is_last(inner, name)
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return _is_last(inner, name)
        case ast.Subscript(value=ast.Name(id=found), slice=index):
            return found == name and evaluate(index, {}) == -1
    return False
