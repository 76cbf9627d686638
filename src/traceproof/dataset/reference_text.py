"""What a reference's text states, read off its syntax tree; no other module that decides a verdict reads it.

`traceproof.dataset.constants` holds each fact against what else states it.
"""

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from traceproof.files import parsed

MODULES = frozenset({"torch", "F"})  # where a function's argument, not its root, is what it works on
PACKED_SHIFT = 16  # by which an expert's index is taken out of an int32 that holds its weight, too
# Functions of PyTorch by which a reference names its activation; an approximation by tanh is a keyword of gelu.
ACTIVATIONS = {"silu": "silu", "sigmoid": "silu", "gelu": "gelu", "erf": "gelu", "tanh": "gelu_tanh"}
HALVES, NEIGHBOURS = "halves", "interleaved"  # which channels a rotary embedding pairs: NeoX, GPT-J
SECOND = re.compile(r":[^:,]*:2\b")  # a slice of every second element
HALF = re.compile(r"^(?!.* [-+*%/] ).+ // 2$")  # nothing but a quotient by 2
# Calls that pair neighbours: every second index, a view whose last axis is a pair, parts stacked on the last axis,
# each angle twice.
PAIRS = re.compile(
    r"\b(ar|r)ange\([^,()]+, [^,()]+, 2\b|\.(view|reshape|unflatten)\(.*, 2\)+$|\bstack\(.*(dim=|, )-1\)$"
    r"|\b(view_as_complex|repeat_interleave)\("
)


@cache
def assigned(reference: str) -> Mapping[str, int | float]:
    """Numbers assigned to a plain name anywhere (`EPS = 1e-6`), the name in lower case.

    A name that is assigned two different numbers, or anything else besides, is left out: a loop's counter, say.
    """
    nodes = list(ast.walk(parsed(reference)))
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    given: dict[str, set[int | float]] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        number = _literal(node.value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                given.setdefault(target.id, set()).add(number)
                bound[target.id] -= 1
    found: dict[str, set[int | float]] = {}
    for name, values in given.items():
        if not bound[name]:
            found.setdefault(name.lower(), set()).update(values)
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


@cache
def numbers(reference: str) -> tuple[tuple[int | float, int], ...]:
    """Every number, with its line."""
    constants = (node for node in ast.walk(parsed(reference)) if isinstance(node, ast.Constant))
    found = ((node.value, node.lineno) for node in constants if isinstance(node.value, int | float))
    return tuple((value, line) for value, line in found if value is not True)


def renumbered(reference: str, changes: Mapping[int, int]) -> str:
    """The text with other whole numbers in the place of some, wherever they stand as such."""
    lines = reference.encode().split(b"\n")  # columns count bytes
    places = sorted(
        (node.lineno - 1, node.col_offset, node.end_col_offset or 0, changes[node.value])
        for node in ast.walk(parsed(reference))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in changes
    )
    for line, start, end, value in reversed(places):
        lines[line] = lines[line][:start] + str(value).encode() + lines[line][end:]
    return b"\n".join(lines).decode()


@cache
def added_to_weight(reference: str) -> float:
    """`WEIGHT_OFFSET`, else the number that is added to the weight in place (`weight + 1`); 0: none."""
    named = assigned(reference).get("weight_offset")
    if named is not None:
        return named
    for node in ast.walk(parsed(reference)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            continue
        for side, other in ((node.left, node.right), (node.right, node.left)):
            names = {one.id for one in ast.walk(side) if isinstance(one, ast.Name)}
            if "weight" in names <= {"weight", "torch"} and isinstance(other, ast.Constant):
                return other.value if isinstance(other.value, int | float) else 0.0
    return 0.0


@cache
def activation(reference: str) -> str | None:
    """`silu`, `gelu` (by the error function) or `gelu_tanh`; None: it calls none, or several."""
    found = set()
    for node in ast.walk(parsed(reference)):
        if not isinstance(node, ast.Call) or (name := _called(node)) not in ACTIVATIONS:
            continue
        by_tanh = any(one.arg == "approximate" and _literal(one.value) == "tanh" for one in node.keywords)
        found.add("gelu_tanh" if by_tanh else ACTIVATIONS[name])
    return found.pop() if len(found) == 1 else None


@cache
def experts_with_weights(reference: str) -> str:
    """`packed` if something is shifted right by 16, which tells an expert from its weight; else `plain`."""
    for node in ast.walk(parsed(reference)):
        match node:
            case ast.BinOp(op=ast.RShift(), right=by) if _is_number(by, PACKED_SHIFT):
                return "packed"
            case ast.Call(func=ast.Attribute(attr="bitwise_right_shift"), args=[_, by]) if _is_number(
                by, PACKED_SHIFT
            ):
                return "packed"
    return "plain"


@cache
def implied_constraints(reference: str, axes: frozenset[str]) -> tuple[str, ...]:
    """Constraints on axes that divisions or assertions imply; a local of an axis' name is taken for it."""
    found, asserted = [], []
    for node in ast.walk(parsed(reference)):
        match node:
            case ast.BinOp(left=ast.Name(id=left), op=ast.FloorDiv(), right=ast.Name() | ast.Constant() as by):
                right = ast.unparse(by)
                if left in axes and (right in axes or right.isdigit()):
                    found.append(f"{left} % {right} == 0 and {left} >= {right}")
            case ast.Assert(test=test):
                names = {one.id for one in ast.walk(test) if isinstance(one, ast.Name)}
                asserted += [ast.unparse(test)] if names and names <= set(axes) else []
    return (*dict.fromkeys(found), *asserted)


@cache
def pairing(reference: str) -> str | None:
    """How the channels of a rotary embedding are paired; None: there are signs of both ways, or of none.

    Neighbours: every second channel is taken, or one of the calls of PAIRS is made. Halves: none of that, and
    channels are cut or joined; cutting something other than the cache at half its size speaks against neighbours.
    The cache itself is cut in half either way. Where a condition chooses, there is no answer.
    """
    nodes = list(ast.walk(parsed(reference)))
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    halves = frozenset(_stored(node for node in assignments if HALF.search(ast.unparse(node.value))))
    cached = {"cos_sin_cache"}
    for _ in range(8):  # a chain of assignments; references are short
        cached |= _stored(node for node in assignments if _is_part_of(node.value, cached))
    signs = {sign for node in nodes if (sign := _sign(node, halves, cached))}
    choices = (node for node in nodes if isinstance(node, ast.If | ast.IfExp) and node.orelse)
    if any(_sign(one, halves, cached) for node in choices for one in ast.walk(node)):
        return None
    joins = any(isinstance(node, ast.Call) and _called(node) in {"cat", "concat", "concatenate"} for node in nodes)
    if not signs:
        return HALVES if joins else None
    return signs.pop() if len(signs) == 1 else None


def _stored(assignments: Iterable[ast.Assign]) -> set[str]:
    """Names that some assignments give a value."""
    targets = (part for node in assignments for target in node.targets for part in ast.walk(target))
    return {part.id for part in targets if isinstance(part, ast.Name)}


def _sign(node: ast.AST, halves: Collection[str], cached: Collection[str]) -> str | None:
    """What one expression says about the pairing, if anything."""
    if isinstance(node, ast.Subscript):
        if SECOND.search(ast.unparse(node.slice)):
            return NEIGHBOURS
        bounds = [
            part for one in ast.walk(node.slice) if isinstance(one, ast.Slice) for part in (one.lower, one.upper)
        ]
        texts = [ast.unparse(part).removeprefix("-") for part in bounds if part is not None]
        cuts = any(HALF.search(text) or text in halves for text in texts)
        return HALVES if cuts and _root(node) not in cached else None
    if not isinstance(node, ast.Call):
        return None
    if PAIRS.search(ast.unparse(node)):
        return NEIGHBOURS
    cut = node.args[0] if _root(node.func) in MODULES and node.args else node.func
    in_two = _called(node) == "chunk" and re.search(r"chunk\((\w+, )?2\b|chunks=2\b", ast.unparse(node))
    return HALVES if in_two and _root(cut) not in cached else None


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _literal(node: ast.expr) -> object:
    """The value of a literal; None where it is none."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_number(node: ast.expr | None, number: int) -> bool:
    return node is not None and _literal(node) == number


def _is_part_of(node: ast.expr, found: Collection[str]) -> bool:
    """Whether a value is a part of one of some names: rows picked, a cast, a slice; not what it is mixed into."""
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
