"""What a reference's text states, read off its syntax tree; no other module that decides a verdict reads it.

`traceproof.dataset.constants` checks each fact against other sources.
"""

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from traceproof.files import parsed

MODULES = frozenset({"torch", "F"})  # modules whose functions work on an argument
PACKED_SHIFT = 16  # by which an expert's index is taken out of an int32 that also holds its weight
CUBIC = 0.044715  # in gelu_tanh alone
# PyTorch functions by which a reference computes its activation; gelu by tanh is a keyword.
ACTIVATIONS = {"silu": "silu", "sigmoid": "silu", "gelu": "gelu", "erf": "gelu", "tanh": "gelu_tanh"}
HALVES, NEIGHBOURS = "halves", "interleaved"  # channels paired by a rotary embedding: NeoX, GPT-J
SECOND = re.compile(r":[^:,]*:2\b")  # a slice of every second element
HALF = re.compile(r"^(?!.* [-+*%/] ).+ // 2$")  # an expression that is only a quotient by 2
# Calls that pair neighbours: every second index, a view whose last axis is a pair, parts stacked on the last axis,
# each angle repeated.
PAIRS = re.compile(
    r"\b(ar|r)ange\([^,()]+, [^,()]+, 2\b|\.(view|reshape|unflatten)\(.*, 2\)+$|\bstack\(.*(dim=|, )-1\)$"
    r"|\b(view_as_complex|repeat_interleave)\("
)


@cache
def assigned(reference: str) -> Mapping[str, int | float]:
    """Numbers assigned to a plain name anywhere (`EPS = 1e-6`), by the name in lower case; True is 1.

    A name that is assigned two different numbers, or anything else, is left out: a loop's counter, for example.
    """
    nodes = list(ast.walk(parsed(reference)))
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    by_name: dict[str, set[int | float]] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        number = _literal(node.value)
        if not isinstance(number, int | float):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                by_name.setdefault(target.id, set()).add(+number)
                bound[target.id] -= 1
    by_lower: dict[str, set[int | float]] = {}
    for name, values in by_name.items():
        if not bound[name]:
            by_lower.setdefault(name.lower(), set()).update(values)
    return {name: next(iter(values)) for name, values in by_lower.items() if len(values) == 1}


@cache
def numbers(reference: str, *, computed: bool = False) -> tuple[tuple[int | float, int], ...]:
    """(number, line) of every number; if `computed`, of those that stand in no assert."""
    nodes = list(ast.walk(parsed(reference)))
    asserts = [node for node in nodes if isinstance(node, ast.Assert)] if computed else []
    checks = {id(part) for one in asserts for part in ast.walk(one)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in checks]
    pairs = ((node.value, node.lineno) for node in constants if isinstance(node.value, int | float))
    return tuple((value, line) for value, line in pairs if value is not True)


def renumbered(reference: str, changes: Mapping[int, int]) -> str:
    """The text with integers replaced, wherever they stand as such."""
    lines = reference.encode().split(b"\n")  # columns of syntax trees count bytes
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
    """`WEIGHT_OFFSET`, else the number added to the weight (`weight + 1`); 0: none."""
    named = assigned(reference).get("weight_offset")
    if named is not None:
        return named
    for node in ast.walk(parsed(reference)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            continue
        for side, addend in ((node.left, node.right), (node.right, node.left)):
            names = {part.id for part in ast.walk(side) if isinstance(part, ast.Name)}
            if "weight" in names <= {"weight", "torch"} and isinstance(addend, ast.Constant):
                return addend.value if isinstance(addend.value, int | float) else 0.0
    return 0.0


@cache
def activation(reference: str) -> str | None:
    """Its activation: `silu`, `gelu` (by the error function) or `gelu_tanh`; None: none or several."""
    activations, nodes = set(), list(ast.walk(parsed(reference)))
    cubic = any(isinstance(node, ast.Constant) and node.value == CUBIC for node in nodes)
    for node in nodes:
        if not isinstance(node, ast.Call) or (name := _called(node)) not in ACTIVATIONS:
            continue
        # Of a product either is a part of several activations: gelu_tanh has sigmoid(2 y), silu has tanh(x / 2).
        product = isinstance(node.args[0] if node.args else getattr(node.func, "value", None), ast.BinOp)
        if name in {"sigmoid", "tanh"} and (cubic or product):
            activations |= {"gelu_tanh"} if cubic else set()
            continue
        by_tanh = any(kw.arg == "approximate" and _literal(kw.value) == "tanh" for kw in node.keywords)
        activations.add("gelu_tanh" if by_tanh else ACTIVATIONS[name])
    return activations.pop() if len(activations) == 1 else None


@cache
def experts_with_weights(reference: str) -> str:
    """`packed` if something is shifted right by 16, which separates an expert from its weight; else `plain`."""
    shifts = []
    for node in ast.walk(parsed(reference)):
        match node:
            case ast.BinOp(op=ast.RShift(), right=by):
                shifts.append(_literal(by))
            case ast.Call(func=ast.Attribute(attr="bitwise_right_shift"), args=[_, by]):
                shifts.append(_literal(by))
    return "packed" if PACKED_SHIFT in shifts else "plain"


@cache
def implied_constraints(reference: str, axes: frozenset[str]) -> tuple[str, ...]:
    """Constraints on axes that divisions and assertions imply; a local with an axis' name is taken for it."""
    divisibility, asserted = [], []
    for node in ast.walk(parsed(reference)):
        match node:
            case ast.BinOp(left=ast.Name(id=left), op=ast.FloorDiv(), right=ast.Name() | ast.Constant() as by):
                right = ast.unparse(by)
                if left in axes and (right in axes or right.isdigit()):
                    divisibility.append(f"{left} % {right} == 0 and {left} >= {right}")
            case ast.Assert(test=test):
                names = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
                asserted += [ast.unparse(test)] if names and names <= set(axes) else []
    return (*dict.fromkeys(divisibility), *asserted)


@cache
def pairing(reference: str) -> str | None:
    """How a rotary embedding pairs channels, HALVES or NEIGHBOURS; None: no signs, or signs of both.

    NEIGHBOURS: every second channel is taken, or one of the calls of PAIRS is made. HALVES: none of that, and
    channels are cut in half or concatenated; cutting the cos/sin cache in half does not count. No answer where a
    condition chooses.
    """
    nodes = list(ast.walk(parsed(reference)))
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    halves = frozenset(_stored(node for node in assignments if HALF.search(ast.unparse(node.value))))
    cached = {"cos_sin_cache"}
    for _ in range(8):  # chains of assignments; references are short
        cached |= _stored(node for node in assignments if _is_part_of(node.value, cached))
    signs = {sign for node in nodes if (sign := _sign(node, halves, cached))}
    choices = (node for node in nodes if isinstance(node, ast.If | ast.IfExp) and node.orelse)
    if any(_sign(part, halves, cached) for node in choices for part in ast.walk(node)):
        return None
    joins = any(isinstance(node, ast.Call) and _called(node) in {"cat", "concat", "concatenate"} for node in nodes)
    if not signs:
        return HALVES if joins else None
    return signs.pop() if len(signs) == 1 else None


def _stored(assignments: Iterable[ast.Assign]) -> set[str]:
    """Names to which these assignments give a value."""
    targets = (part for node in assignments for target in node.targets for part in ast.walk(target))
    return {part.id for part in targets if isinstance(part, ast.Name)}


def _sign(node: ast.AST, halves: Collection[str], cached: Collection[str]) -> str | None:
    """The pairing that one expression is a sign of; None: of none."""
    if isinstance(node, ast.Subscript):
        if SECOND.search(ast.unparse(node.slice)):
            return NEIGHBOURS
        bounds = [end for s in ast.walk(node.slice) if isinstance(s, ast.Slice) for end in (s.lower, s.upper)]
        texts = [ast.unparse(end).removeprefix("-") for end in bounds if end is not None]
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
    """The value of a literal; None: it is no literal."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_part_of(node: ast.expr, names: Collection[str]) -> bool:
    """Whether a value is a part of one of these names: rows, a cast or a slice; not a value computed from it."""
    root = _root(node)
    if root in MODULES and isinstance(node, ast.Call):  # torch.index_select(cache, 0, positions)
        return any(_root(argument) in names for argument in node.args)
    return root in names


def _root(node: ast.AST) -> str | None:
    """The name `x` at the start of `x[...].method(...)[...]`; None: there is none."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript | ast.Attribute):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id
