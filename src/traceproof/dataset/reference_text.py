"""What a reference's text states, read off its syntax tree; no other module that decides a verdict reads it.

`traceproof.dataset.constants` holds each fact against what else states it.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

from traceproof.files import parsed

MODULES = frozenset({"torch", "F"})  # where a function's argument, not its root, is what it works on
PACKED_SHIFT = 16  # by which an expert's index is taken out of an int32 that holds its weight, too
# Functions of PyTorch by which a reference names its activation; an approximation by tanh is a keyword of gelu.
ACTIVATIONS = {"silu": "silu", "sigmoid": "silu", "gelu": "gelu", "erf": "gelu", "tanh": "gelu_tanh"}
HALVES, NEIGHBOURS = "halves", "interleaved"  # which channels a rotary embedding pairs: NeoX, GPT-J


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

    Neighbours: every second channel is taken, pairs are viewed as a last axis of 2, parts are stacked on the last
    axis, or each angle is repeated. Halves: none of that, and channels are cut or joined; cutting something other
    than the cache at half its size speaks against neighbours. The cache itself is cut in half either way. Where a
    condition chooses, there is no answer.
    """
    module = parsed(reference)
    assignments = [node for node in ast.walk(module) if isinstance(node, ast.Assign)]
    halved = (one for node in assignments if _is_half(node.value, frozenset()) for one in node.targets)
    halves = frozenset(one.id for one in halved if isinstance(one, ast.Name))
    cached = _names_from(module, "cos_sin_cache")
    signs, joins = set(), False
    for node, conditional in _walk(module, conditional=False):
        joins = joins or (isinstance(node, ast.Call) and _called(node) in {"cat", "concat", "concatenate"})
        sign = _sign(node, halves, cached)
        if sign is not None and conditional:
            return None
        signs.add(sign)
    signs.discard(None)
    if not signs:
        return HALVES if joins else None
    return signs.pop() if len(signs) == 1 else None


def _walk(node: ast.AST, *, conditional: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether a condition with an else decides about it."""
    yield node, conditional
    chooses = isinstance(node, ast.If | ast.IfExp) and bool(node.orelse)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, conditional=conditional or chooses)


def _sign(node: ast.AST, halves: frozenset[str], cached: frozenset[str]) -> str | None:
    """What one expression says about the pairing, if anything."""
    if isinstance(node, ast.Subscript):
        slices = [part for part in ast.walk(node.slice) if isinstance(part, ast.Slice)]
        if any(_is_number(part.step, 2) for part in slices):
            return NEIGHBOURS
        cuts = any(_is_half(bound, halves) for part in slices for bound in (part.lower, part.upper))
        return HALVES if cuts and _root(node) not in cached else None
    if isinstance(node, ast.Call):
        if _pairs_neighbours(node):
            return NEIGHBOURS
        return HALVES if _cuts_in_two(node, cached) else None
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
    return _root(node.args[0] if _root(node.func) in MODULES and node.args else node.func) not in cached


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


def _is_half(node: ast.expr | None, halves: frozenset[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in halves
    if isinstance(node, ast.UnaryOp):
        return _is_half(node.operand, halves)
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and _is_number(node.right, 2)


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
