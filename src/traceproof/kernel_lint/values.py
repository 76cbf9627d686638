"""What is known of a value inside a Triton kernel: how wide it is, and whether it comes from the grid."""

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from traceproof.audit.source import dotted, last_name
from traceproof.text import names

GRID = frozenset({"program_id", "num_programs"})
PASSES_ON = names("cdiv minimum maximum min max abs where multiple_of max_contiguous")
SMALL = 64  # a product with a literal up to this leaves a program id far below 2**31
BARE, INDEX, PRODUCT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Value:
    """Facts of an expression."""

    grid: bool = False  # it is computed from a program id or the grid's size
    # BARE (a program id, divided or times a small literal), INDEX (multiplied once, so a position along an axis),
    # PRODUCT (multiplied further: an offset)
    level: int = BARE
    wide: bool = False  # it is 64 bits wide
    wrapped: bool = False  # it was a PRODUCT in 32 bits before it was widened
    blocks: frozenset[str] = frozenset()  # names X for which `<program id or loop variable> * X` is a term of it
    ranges: frozenset[str] = frozenset()  # names X for which `tl.arange(0, X)` is a term of it
    tail: frozenset[str] = frozenset()  # names X for which both are: its last block of X may reach beyond the end
    # of a value with a range in it, texts of what is added up: by these a mask elsewhere means it too
    spans: frozenset[str] = frozenset()
    origin: str = ""  # where its program id was read, for messages
    counts: bool = False  # a bare program id or loop variable
    looped: bool = False  # computed from the variable of a loop that run-time numbers bound
    runtime: bool = False  # a number that the kernel is given when it is launched, such as a stride

    @property
    def late(self) -> bool:
        """Whether it is a product in 32 bits, which a cast comes too late for."""
        return self.narrow and self.level == PRODUCT

    @property
    def narrow(self) -> bool:
        """From the grid, or an offset from a loop, and nowhere widened in time."""
        offset = self.looped and self.level == PRODUCT
        return self.wrapped or ((self.grid or offset) and not self.wide)

    def merged(self, other: "Value") -> "Value":
        """Of two branches: whatever may be wrong in one of them."""
        worse = max(self, other, key=lambda value: (value.narrow, value.wrapped, value.level, value.grid))
        return replace(
            worse,
            blocks=self.blocks | other.blocks,
            ranges=self.ranges | other.ranges,
            tail=self.tail | other.tail,
            spans=self.spans | other.spans,
            counts=False,
        )


NOTHING = Value()
Known = Mapping[str, Value]


def evaluate(node: ast.expr, known: Known) -> Value:
    """Facts of an expression, by those of the names in it."""
    match node:
        case ast.Name(id=name):
            found = known.get(name, NOTHING)
            return replace(found, spans=found.spans | {name}) if found.spans else found
        case ast.BinOp():
            return _binary(node, known)
        case ast.Call():
            return _call(node, known)
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
            return evaluate(inner, known)
        case ast.IfExp(body=one, orelse=other):
            return evaluate(one, known).merged(evaluate(other, known))
        case _:
            return NOTHING


def _binary(node: ast.BinOp, known: Known) -> Value:
    left, right = evaluate(node.left, known), evaluate(node.right, known)
    both = _both(left, right)
    match node.op:
        case ast.Mult():
            return _product(node, both, (left, right))
        case ast.Add() | ast.Sub():
            blocks = left.blocks | right.blocks
            spans = both.spans
            if spans:
                spans |= {text_of(one) for one in addends(node) if not evaluate(one, known).spans}
            return replace(both, blocks=blocks, tail=both.tail | (blocks & both.ranges), spans=spans)
        case ast.FloorDiv() | ast.Mod() | ast.Div():
            none = frozenset[str]()
            spans = none if isinstance(node.op, ast.Mod) else both.spans  # a remainder has its bound in it
            level = min(both.level, INDEX)
            return replace(both, ranges=none, tail=none, spans=spans, level=level, counts=both.grid)
        case _:
            return both


def _both(left: Value, right: Value) -> Value:
    """What any operation makes of its two sides."""
    source = left if left.narrow or not right.grid else right
    wide = left.wide or right.wide
    return Value(
        grid=left.grid or right.grid,
        level=max((side.level for side in (left, right) if side.grid or side.looped), default=BARE),
        wide=wide,
        wrapped=left.wrapped or right.wrapped or (wide and (left.late or right.late)),
        ranges=left.ranges | right.ranges,
        tail=left.tail | right.tail,
        spans=left.spans | right.spans,
        origin=source.origin or left.origin or right.origin,
        looped=left.looped or right.looped,
    )


def addends(node: ast.expr) -> Iterator[ast.expr]:
    """What a sum adds up; the expression itself where it is none."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from addends(node.left)
        yield from addends(node.right)
    else:
        yield node


def text_of(node: ast.expr) -> str:
    """An expression without the `[:, None]` that only say along which axis it lies."""
    return ast.unparse(_Flat().visit(ast.parse(ast.unparse(node), mode="eval")))


class _Flat(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """What is indexed."""
        return self.visit(node.value)  # type: ignore[no-any-return]


def spanned(arguments: Sequence[ast.expr], known: Known) -> Value:
    """The variable of a loop over `range(*arguments)`: as wide as the widest of them."""
    found = [evaluate(argument, known) for argument in arguments]
    merged = NOTHING
    for value in found:
        merged = merged.merged(value)
    wide = any(value.wide for value in found)
    return Value(grid=merged.grid, level=merged.level, wide=wide, origin=merged.origin, counts=True)


def bounded(arguments: Sequence[ast.expr], constants: Collection[str]) -> bool:
    """Whether a loop's bounds are literals and compile-time constants: it has few turns, which are unrolled."""
    names = (name.id for argument in arguments for name in ast.walk(argument) if isinstance(name, ast.Name))
    return all(name in constants for name in names)


def _product(node: ast.BinOp, both: Value, sides: tuple[Value, Value]) -> Value:
    level = both.level
    if (both.grid or both.looped) and not both.wide and not (_is_small(node.left) or _is_small(node.right)):
        # A loop runs over blocks: times their constant size it is a position, times a stride an offset at once.
        strided = both.looped and any(side.runtime for side in sides)
        level = PRODUCT if strided else min(level + 1, PRODUCT)
    blocks = frozenset(
        other.id
        for other, value in ((node.left, sides[1]), (node.right, sides[0]))
        if isinstance(other, ast.Name) and value.counts
    )
    return replace(both, level=level, blocks=blocks, ranges=frozenset())


def _is_small(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) <= SMALL


def _call(node: ast.Call, known: Known) -> Value:
    name = last_name(node.func)
    if name in GRID:
        return Value(grid=True, origin=f"tl.{name} in line {node.lineno}", counts=True)
    if name == "arange" and len(node.args) == 2:
        end = node.args[1]
        ranges = frozenset({end.id}) if isinstance(end, ast.Name) else frozenset[str]()
        return Value(ranges=ranges, spans=frozenset({ast.unparse(node)}))
    if name in {"to", "cast"} and (node.args or name == "to"):
        inner = node.func.value if name == "to" and isinstance(node.func, ast.Attribute) else node.args[0]
        return _cast(evaluate(inner, known), inner, node, known)
    if name in PASSES_ON:
        found = NOTHING
        for argument in node.args:
            found = found.merged(evaluate(argument, known))
        return found
    return NOTHING


def _cast(value: Value, inner: ast.expr, node: ast.Call, known: Known) -> Value:
    """A cast to 64 bits widens, too late for a product; what the grid loads and cuts to 32 bits is the grid's."""
    kinds = {dotted(one).rpartition(".")[2] for one in [*node.args, *(keyword.value for keyword in node.keywords)]}
    if kinds & {"int64", "uint64"}:
        late = value.narrow and value.level == PRODUCT
        return replace(value, wide=True, wrapped=value.wrapped or late)
    if kinds & {"int32", "uint32"} and isinstance(inner, ast.Call) and last_name(inner.func) == "load":
        names = {one.id for one in ast.walk(inner) if isinstance(one, ast.Name)}
        if any(known.get(name, NOTHING).grid for name in names):
            return Value(grid=True, origin=f"the 32-bit index loaded in line {node.lineno}", counts=True)
    return value
