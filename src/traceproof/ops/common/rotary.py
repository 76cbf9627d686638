"""Which channels a rotary embedding pairs, read from a reference's syntax tree: the schema does not say."""

import ast
import functools
from collections.abc import Iterator
from enum import StrEnum

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Unsupported

MODULES = frozenset({"torch", "F"})  # where a function's argument, not its root, is what it works on


class Pairing(StrEnum):
    """Channel i is rotated with channel i + half, or with its neighbour."""

    HALVES = "halves"  # NeoX
    INTERLEAVED = "interleaved"  # GPT-J


def pairing(definition: Definition) -> Pairing:
    """How the reference pairs channels.

    Interleaved: it takes every second channel, views pairs as a last axis of 2, stacks the parts on the last axis,
    or repeats each angle. Halves: none of that, and it cuts or joins channels; cutting something other than the
    cache at half its size speaks against interleaved. The cache itself is cut in half under both conventions.
    Raises Unsupported: it shows signs of both or of none, or lets a condition choose.
    """
    return _pairing(definition.reference)


@functools.cache
def _pairing(reference: str) -> Pairing:
    module = ast.parse(reference)
    halves = _half_names(module)
    cached = _names_from(module, "cos_sin_cache")
    signs = {Pairing.INTERLEAVED: False, Pairing.HALVES: False}
    joins = False
    for node, conditional in _walk(module, conditional=False):
        joins = joins or (isinstance(node, ast.Call) and _called(node) in {"cat", "concat", "concatenate"})
        sign = _sign(node, halves, cached)
        if sign is None:
            continue
        if conditional:
            raise Unsupported(f"a condition in the reference chooses the pairing of channels (line {_line(node)})")
        signs[sign] = True
    if all(signs.values()):
        raise Unsupported("the reference shows signs of both pairings of channels, halves and neighbours")
    if signs[Pairing.INTERLEAVED]:
        return Pairing.INTERLEAVED
    if signs[Pairing.HALVES] or joins:
        return Pairing.HALVES
    raise Unsupported("the reference does not show which channels are paired, halves or neighbours")


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _walk(node: ast.AST, *, conditional: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether a condition with an else decides about it."""
    yield node, conditional
    chooses = isinstance(node, ast.If | ast.IfExp) and bool(node.orelse)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, conditional=conditional or chooses)


def _sign(node: ast.AST, halves: frozenset[str], cached: frozenset[str]) -> Pairing | None:
    """What one expression says about the pairing, if anything."""
    if isinstance(node, ast.Subscript):
        slices = [part for part in ast.walk(node.slice) if isinstance(part, ast.Slice)]
        if any(_is_number(part.step, 2) for part in slices):
            return Pairing.INTERLEAVED
        cuts = any(_is_half(bound, halves) for part in slices for bound in (part.lower, part.upper))
        return Pairing.HALVES if cuts and _root(node) not in cached else None
    if isinstance(node, ast.Call):
        if _pairs_neighbours(node):
            return Pairing.INTERLEAVED
        return Pairing.HALVES if _cuts_in_two(node, cached) else None
    return None


def _pairs_neighbours(node: ast.Call) -> bool:
    """A view whose last axis is a pair, parts stacked on the last axis, each angle twice, every second index."""
    name = _called(node)
    if name in {"arange", "range"}:
        return len(node.args) > 2 and _is_number(node.args[2], 2)
    if name in {"view", "reshape", "unflatten"}:
        arguments = list(node.args)
        if arguments and isinstance(arguments[-1], ast.Tuple | ast.List):
            arguments = list(arguments[-1].elts)
        return len(arguments) > 1 and _is_number(arguments[-1], 2)
    if name == "stack":
        axes = [keyword.value for keyword in node.keywords if keyword.arg == "dim"] + node.args[1:2]
        return any(_is_number(axis, -1) for axis in axes)
    return name in {"view_as_complex", "repeat_interleave"}


def _cuts_in_two(node: ast.Call, cached: frozenset[str]) -> bool:
    """`x.chunk(2, ...)` or `torch.chunk(x, 2, ...)` of something other than the cache."""
    numbers = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "chunks")]
    if _called(node) != "chunk" or not any(_is_number(argument, 2) for argument in numbers):
        return False
    cut: ast.expr = node.func
    if _root(cut) in MODULES and node.args:
        cut = node.args[0]
    return _root(cut) not in cached


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_number(node: ast.expr | None, number: int) -> bool:
    try:
        return node is not None and bool(ast.literal_eval(node) == number)
    except ValueError:
        return False


def _is_half(node: ast.expr | None, halves: frozenset[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in halves
    if isinstance(node, ast.UnaryOp):
        return _is_half(node.operand, halves)
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and _is_number(node.right, 2)


def _half_names(module: ast.Module) -> frozenset[str]:
    """Names that are assigned something // 2."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and _is_half(node.value, frozenset()):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def _names_from(module: ast.Module, source: str) -> frozenset[str]:
    """`source`, and names assigned a part of it: rows picked, a cast, a slice; not what it is mixed into."""
    found = {source}
    for _ in range(8):  # a chain of assignments; references are short
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and _is_part_of(node.value, found):
                for target in node.targets:
                    found |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    return frozenset(found)


def _is_part_of(node: ast.expr, found: set[str]) -> bool:
    root = _root(node)
    if root in MODULES and isinstance(node, ast.Call):  # torch.index_select(cache, 0, positions)
        return any(_root(argument) in found for argument in node.args)
    return root in found


def _root(node: ast.AST) -> str | None:
    """The name at the bottom of `name[...].method(...)[...]`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript | ast.Attribute):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id
