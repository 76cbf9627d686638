"""Finds mistakes in Triton kernels and their tests without running anything."""

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from traceproof.audit import at, dotted, last_name
from traceproof.dataset.tree import explain
from traceproof.errors import TraceproofError
from traceproof.files import parse_quietly
from traceproof.lint.model import Finding, LintReport, chosen, reported
from traceproof.text import names

GRID = frozenset({"program_id", "num_programs"})
PASSES_ON = names("cdiv minimum maximum min max abs where multiple_of max_contiguous")
SMALL = 64  # up to this literal factor, a program id stays far below 2**31
BARE, INDEX, PRODUCT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Value:
    """Facts of an expression."""

    grid: bool = False  # depends on a program id or the grid's size
    # BARE (a program id, divided or times a small literal), INDEX (multiplied once, so a position along an axis),
    # PRODUCT (multiplied further: an offset)
    level: int = BARE
    wide: bool = False  # 64 bits wide
    wrapped: bool = False  # was a PRODUCT in 32 bits before it was widened
    blocks: frozenset[str] = frozenset()  # names X for which `<program id or loop variable> * X` is a term
    ranges: frozenset[str] = frozenset()  # names X for which `tl.arange(0, X)` is a term
    tail: frozenset[str] = frozenset()  # names X in both: the last block of X may reach beyond the end
    # if a range is in it, texts of the terms: a mask with the same terms guards it too
    spans: frozenset[str] = frozenset()
    origin: str = ""  # for messages: where its program id was read
    counts: bool = False  # a bare program id or loop variable
    looped: bool = False  # depends on the variable of a loop with run-time bounds
    runtime: bool = False  # a number passed at launch, such as a stride

    @property
    def late(self) -> bool:
        """Whether it is a 32-bit product, for which a cast comes too late."""
        return self.narrow and self.level == PRODUCT

    @property
    def narrow(self) -> bool:
        """Whether it depends on the grid, or is an offset in a loop, and was not widened in time."""
        offset = self.looped and self.level == PRODUCT
        return self.wrapped or ((self.grid or offset) and not self.wide)

    def merged(self, other: "Value") -> "Value":
        """The facts after two branches: whatever may be wrong in one of them."""
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
    """Facts of an expression, from those of the names in it."""
    match node:
        case ast.Name(id=name):
            value = known.get(name, NOTHING)
            return replace(value, spans=value.spans | {name}) if value.spans else value
        case ast.BinOp():
            return _binary(node, known)
        case ast.Call():
            return _call(node, known)
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
            return evaluate(inner, known)
        case ast.IfExp(body=if_true, orelse=if_false):
            return evaluate(if_true, known).merged(evaluate(if_false, known))
        case _:
            return NOTHING


def _binary(node: ast.BinOp, known: Known) -> Value:
    """Facts of a binary operation."""
    left, right = evaluate(node.left, known), evaluate(node.right, known)
    source = left if left.narrow or not right.grid else right
    wide, none = left.wide or right.wide, frozenset[str]()
    both = Value(
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
    match node.op:
        case ast.Mult():
            literals = [factor.value for factor in (node.left, node.right) if isinstance(factor, ast.Constant)]
            small = any(isinstance(factor, int) and abs(factor) <= SMALL for factor in literals)
            level = both.level
            if (both.grid or both.looped) and not both.wide and not small:
                # A loop counts blocks: times a constant block size it is a position, times a stride an offset.
                strided = both.looped and (left.runtime or right.runtime)
                level = PRODUCT if strided else min(level + 1, PRODUCT)
            sides = ((node.left, right), (node.right, left))
            blocks = frozenset(name.id for name, value in sides if isinstance(name, ast.Name) and value.counts)
            return replace(both, level=level, blocks=blocks, ranges=none)
        case ast.Add() | ast.Sub():
            blocks, spans = left.blocks | right.blocks, both.spans
            if spans:
                spans |= {text_of(term) for term in addends(node) if not evaluate(term, known).spans}
            return replace(both, blocks=blocks, tail=both.tail | (blocks & both.ranges), spans=spans)
        case ast.FloorDiv() | ast.Mod() | ast.Div():
            spans = none if isinstance(node.op, ast.Mod) else both.spans  # a remainder is bounded
            level = min(both.level, INDEX)
            return replace(both, ranges=none, tail=none, spans=spans, level=level, counts=both.grid)
        case _:
            return both


def addends(node: ast.expr) -> Iterator[ast.expr]:
    """The terms of a sum; the expression itself if it is none."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from addends(node.left)
        yield from addends(node.right)
    else:
        yield node


def text_of(node: ast.expr) -> str:
    """The text of an expression without subscripts like `[:, None]`, which only say along which axis it varies."""
    return ast.unparse(_Flat().visit(ast.parse(ast.unparse(node), mode="eval")))


class _Flat(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replace a subscript by its value."""
        return self.visit(node.value)  # type: ignore[no-any-return]


def _call(node: ast.Call, known: Known) -> Value:
    """Facts of a call."""
    name = last_name(node.func)
    if name in GRID:
        return Value(grid=True, origin=f"tl.{name} in line {node.lineno}", counts=True)
    if name == "arange" and len(node.args) == 2:
        end = node.args[1]
        ranges = frozenset({end.id}) if isinstance(end, ast.Name) else frozenset[str]()
        return Value(ranges=ranges, spans=frozenset({ast.unparse(node)}))
    if name in {"to", "cast"} and (node.args or (name == "to" and isinstance(node.func, ast.Attribute))):
        inner = node.func.value if name == "to" and isinstance(node.func, ast.Attribute) else node.args[0]
        return _cast(evaluate(inner, known), inner, node, known)
    passed = node.args if name in PASSES_ON else []
    return reduce(Value.merged, (evaluate(argument, known) for argument in passed), NOTHING)


def _cast(value: Value, inner: ast.expr, node: ast.Call, known: Known) -> Value:
    """A cast to 64 bits widens, too late for a product; a load by the grid, cast to 32 bits, counts as grid."""
    kinds = {dotted(arg).rpartition(".")[2] for arg in [*node.args, *(keyword.value for keyword in node.keywords)]}
    if kinds & {"int64", "uint64"}:
        return replace(value, wide=True, wrapped=value.wrapped or value.late)
    if kinds & {"int32", "uint32"} and isinstance(inner, ast.Call) and last_name(inner.func) == "load":
        names = {part.id for part in ast.walk(inner) if isinstance(part, ast.Name)}
        if any(known.get(name, NOTHING).grid for name in names):
            return Value(grid=True, origin=f"the 32-bit index loaded in line {node.lineno}", counts=True)
    return value


MEMORY = names("load store atomic_add atomic_max atomic_min atomic_cas atomic_xchg make_block_ptr")


def pointers(function: ast.FunctionDef) -> frozenset[str]:
    """Names of addresses: used to access memory, or terms of such addresses."""
    assigned: dict[str, list[ast.expr]] = {}
    waiting: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _bind(target, node.value, assigned)
        elif isinstance(node, ast.Call) and last_name(node.func) in MEMORY and node.args:
            waiting.append(node.args[0])
            waiting += [keyword.value for keyword in node.keywords if keyword.arg in {"base", "pointer"}]
    bases: set[str] = set()
    while waiting:
        for leaf in addends(waiting.pop()):
            if isinstance(leaf, ast.Name) and leaf.id not in bases and _is_address(leaf.id, function, assigned):
                bases.add(leaf.id)
                waiting += assigned.get(leaf.id, [])
    return frozenset(bases)


def _bind(target: ast.expr, value: ast.expr, assigned: dict[str, list[ast.expr]]) -> None:
    if isinstance(target, ast.Name):
        assigned.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, part in zip(target.elts, value.elts, strict=False):
            _bind(name, part, assigned)


def _is_address(name: str, function: ast.FunctionDef, assigned: dict[str, list[ast.expr]], depth: int = 8) -> bool:
    """Whether a name in an address is the base, not an offset: a parameter, or a sum with one.

    A parameter that is multiplied, compared or constexpr is a size.
    """
    parameters = {arg.arg: arg for arg in function.args.args}
    if name in parameters:
        return not _is_constexpr(parameters[name]) and not _is_size(name, function)
    values = assigned.get(name, [])
    return depth > 0 and any(
        isinstance(leaf, ast.Name) and leaf.id != name and _is_address(leaf.id, function, assigned, depth - 1)
        for value in values
        for leaf in addends(value)
        if not isinstance(value, ast.Call)
    )


def _is_size(name: str, function: ast.FunctionDef) -> bool:
    """Whether a parameter is multiplied or compared, other than with None."""
    for node in ast.walk(function):
        sides: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add | ast.Sub):
            sides = [node.left, node.right]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        texts = [ast.unparse(side) for side in sides if isinstance(side, ast.Name | ast.Constant)]
        if name in texts and not (isinstance(node, ast.Compare) and "None" in texts):
            return True
    return False


CALLS = 3  # depth of calls between kernels that is followed
MASKED = frozenset({"mask", "boundary_check"})


JIT = names("triton.jit jit triton.experimental.gluon.jit gluon.jit")


def kernels(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions that Triton compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = (mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list)
            if JIT & set(map(dotted, decorators)):
                yield node


def _is_constexpr(argument: ast.arg) -> bool:
    """Whether a parameter is known at compile time, not only at launch."""
    return argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)


class Kernel:
    """One kernel, walked once."""

    def __init__(
        self,
        path: Path,  # for findings
        function: ast.FunctionDef,  # the kernel
        lines: list[str],  # lines of its file
        # names of block sizes by which the file divides a length, rounding up, so the last block may be partial.
        # None: the file launches nothing, so any block may.
        partial: frozenset[str] | None,
        argument_facts: Known,  # facts of parameters, by name, if another kernel calls this one
    ) -> None:
        self._path = path
        self._function = function
        self._lines = lines
        self._partial = partial
        self._pointers = pointers(function) - {name for name, value in argument_facts.items() if value.grid}
        self._branched: dict[str, tuple[dict[str, Value], dict[str, Value], dict[str, Value]]] = {}
        sizes = [argument for argument in function.args.args if argument.arg not in self._pointers]
        self._constants = {argument.arg for argument in sizes if _is_constexpr(argument)}
        numbers = (argument.arg for argument in sizes if not _is_constexpr(argument))
        self._known: dict[str, Value] = {name: Value(runtime=True) for name in numbers} | dict(argument_facts)
        # calls of plain names: (name, facts of positional arguments, facts of keyword arguments)
        self.calls: list[tuple[str, list[Value], dict[str, Value]]] = []
        self._found: dict[tuple[int, int, str], Finding] = {}
        self._unmasked: list[tuple[ast.Call, Value]] = []
        # terms of blocks that the kernel compares with a length somewhere
        self._guards: set[frozenset[str]] = set()
        self._counting = _counting(function) | (partial or frozenset())

    def findings(self) -> set[Finding]:
        """Addresses that may wrap, and blocks that may reach beyond the end."""
        self._block(self._function.body)
        for call, address in self._unmasked:
            launched = address.tail if self._partial is None else address.tail & self._partial
            if launched or any(guard <= address.spans for guard in self._guards):
                self._add(call, "KL103", ast.unparse(call)[:80])
        return set(self._found.values())

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        """Follow one statement: check its expressions, and update the facts of names."""
        match statement:
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                self._look(value)
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    self._assign(target, value)
            case ast.AugAssign(target=ast.Name() as target, op=op, value=value):
                self._augmented(statement, target, op, value)
            case ast.If(test=test, body=body, orelse=orelse):
                self._look(test)
                self._branches(test, body, orelse)
            case ast.For(target=target, iter=iterable, body=body):
                self._look(iterable)
                if isinstance(target, ast.Name):
                    self._known[target.id] = self._counter(iterable)
                self._block([*body, *body])  # twice, since what the first iteration assigns is known in the second
            case ast.While(body=body) | ast.With(body=body):
                self._block([*body, *body])
            case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
                self._look(value)
            case _:
                pass

    def _branches(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        """Follow both branches; if the same test was met before, each starts with what its branch then left."""
        before, key = dict(self._known), ast.unparse(test)
        if_true, if_false, joined = self._branched.get(key, ({}, {}, {}))
        same = {name for name, value in joined.items() if before.get(name) is value}
        self._known = {**before, **{name: if_true[name] for name in same if name in if_true}}
        self._block(body)
        first = self._known
        self._known = {**before, **{name: if_false[name] for name in same if name in if_false}}
        self._block(orelse)
        second = self._known
        self._known = {
            # Values that are the same object in both stay, since `is` recognises them later.
            name: if_taken if if_taken is if_not else if_taken.merged(if_not)
            for name in first.keys() | second.keys()
            for if_taken, if_not in [(first.get(name, NOTHING), second.get(name, NOTHING))]
        }
        self._branched[key] = (first, second, dict(self._known))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [(name, self._facts(name, part)) for name, part in zip(target.elts, value.elts, strict=False)]
            for name, facts in pairs:  # evaluate all before binding any
                if isinstance(name, ast.Name):
                    self._known[name.id] = facts
        elif isinstance(target, ast.Name):
            self._known[target.id] = self._facts(target, value)

    def _facts(self, target: ast.expr, value: ast.expr, known: Known | None = None) -> Value:
        """Facts of an assigned value; for a pointer, always 64 bits wide, only the terms of its offset."""
        facts = evaluate(value, self._known if known is None else known)
        if isinstance(target, ast.Name) and target.id in self._pointers:
            return Value(blocks=facts.blocks, ranges=facts.ranges, tail=facts.tail, spans=facts.spans)
        return facts

    def _counter(self, iterable: ast.expr) -> Value:
        """Facts of the variable of a loop over `range(...)`: as wide as the widest of its bounds."""
        arguments = iterable.args if isinstance(iterable, ast.Call) else []
        values = [evaluate(argument, self._known) for argument in arguments]
        merged, wide = reduce(Value.merged, values, NOTHING), any(value.wide for value in values)
        counter = Value(grid=merged.grid, level=merged.level, wide=wide, origin=merged.origin, counts=True)
        # Loops with literal or compile-time bounds are short and unrolled.
        bounds = (name.id for bound in arguments for name in ast.walk(bound) if isinstance(name, ast.Name))
        if counter.grid or all(name in self._constants for name in bounds):
            return counter
        return replace(counter, looped=True, origin=f"the loop variable in line {iterable.lineno}")

    def _augmented(self, node: ast.AugAssign, target: ast.Name, op: ast.operator, value: ast.expr) -> None:
        """Follow `name += value`; both branches' values of the name, if remembered, are updated too."""
        self._look(value)
        if target.id in self._pointers:
            self._addend(node, value)
        sum_ = ast.copy_location(ast.BinOp(ast.Name(target.id, ast.Load()), op, value), node)
        before = self._known.get(target.id)
        self._known[target.id] = after = self._facts(target, sum_)
        for if_true, if_false, joined in self._branched.values():
            if before is not None and joined.get(target.id) is before:  # each branch's value is updated too
                joined[target.id] = after
                for way in (if_true, if_false):
                    value_there = way.get(target.id, NOTHING)
                    known = {**self._known, target.id: value_there}
                    way[target.id] = after if value_there is before else self._facts(target, sum_, known)

    def _look(self, expression: ast.expr) -> None:
        """Check every address computed in an expression, and every access to memory."""
        partial: set[int] = set()  # ids of sums that begin a longer one, and are checked with it
        for node in ast.walk(expression):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and id(node) not in partial:
                terms = list(addends(node))
                in_terms = {id(part) for term in terms for part in ast.walk(term)}
                partial |= {id(part) for part in ast.walk(node) if isinstance(part, ast.BinOp)} - in_terms
                offsets = [t for t in terms if not (isinstance(t, ast.Name) and t.id in self._pointers)]
                for offset in offsets if len(offsets) < len(terms) else ():
                    self._addend(offset, offset)
            elif isinstance(node, ast.Call):
                self._access(node)
            elif isinstance(node, ast.Compare):
                self._guard(node)

    def _addend(self, node: ast.AST, expression: ast.expr) -> None:
        facts = evaluate(expression, self._known)
        if facts.narrow:
            how = "was multiplied in 32 bits before it was cast" if facts.wrapped else "is 32 bits wide"
            code = "KL104" if facts.level == BARE and not facts.wrapped else "KL101"
            self._add(node, code, f"{ast.unparse(expression)} {how}, from {facts.origin}")

    def _access(self, call: ast.Call) -> None:
        """Check a call that accesses memory, and record a call of a plain name with its arguments' facts."""
        name = last_name(call.func)
        if isinstance(call.func, ast.Name):
            keywords = {word.arg: evaluate(word.value, self._known) for word in call.keywords if word.arg}
            self.calls.append((name, [evaluate(argument, self._known) for argument in call.args], keywords))
        if name == "make_block_ptr":
            self._add(call, "KL102", ast.unparse(call)[:80])
        needed = {"load": 1, "store": 2}.get(name, 0)  # number of arguments before a mask
        of_triton = dotted(call.func).startswith(("tl.", "triton."))
        masked = any(keyword.arg in MASKED for keyword in call.keywords) or len(call.args) > needed
        if of_triton and call.args and not masked:
            self._unmasked.append((call, evaluate(call.args[0], self._known)))

    def _guard(self, node: ast.Compare) -> None:
        """Record a comparison of a block with a length, as in masks; one of two blocks says nothing of an end."""
        if not isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            return
        sides = [node.left, *node.comparators]
        blocks = [side for side in sides if evaluate(side, self._known).spans]
        nodes = (inner for side in sides if side not in blocks for inner in ast.walk(side))
        others = {inner.id for inner in nodes if isinstance(inner, ast.Name)}
        if len(blocks) == 1 and not others & self._counting:
            self._guards.add(frozenset(text_of(term) for term in addends(blocks[0])))

    def _add(self, node: ast.AST, code: str, evidence: str) -> None:
        finding = at(self._path, node, code, f"{self._function.name}: {evidence}", self._lines)
        self._found.setdefault((finding.line, finding.column, code), finding)


def _counting(function: ast.FunctionDef) -> frozenset[str]:
    """Names that are no lengths: block sizes, and loop variables."""
    excluded: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and last_name(node.func) == "arange":
            excluded |= {inner.id for arg in node.args for inner in ast.walk(arg) if isinstance(inner, ast.Name)}
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            excluded.add(node.target.id)
    return frozenset(excluded)


def findings_of(path: Path, tree: ast.Module, lines: list[str]) -> set[Finding]:
    """Findings in every kernel of a file, and in its helpers with the facts of kernels' arguments."""
    partial, compiled = partial_blocks(tree), list(kernels(tree))
    helpers = {function.name: function for function in compiled}
    findings: set[Finding] = set()
    for function in compiled:
        waiting: list[tuple[ast.FunctionDef, Known, int]] = [(function, {}, 0)]
        while waiting:
            callee, facts_of_arguments, depth = waiting.pop()
            kernel = Kernel(path, callee, lines, partial, facts_of_arguments)
            findings |= kernel.findings()
            for name, values, keywords in kernel.calls if depth < CALLS else ():
                if name in helpers and any(value.grid for value in (*values, *keywords.values())):
                    parameters = [argument.arg for argument in helpers[name].args.args]
                    facts = {**dict(zip(parameters, values, strict=False)), **keywords}
                    waiting.append((helpers[name], facts, depth + 1))
    return findings


def partial_blocks(tree: ast.Module) -> frozenset[str] | None:
    """Names by which a file divides lengths, rounding up; None: none. Multiples of other blocks do not count."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and last_name(node.func) == "cdiv")
    divisions = [(_named(call.args[0]), _named(call.args[1])) for call in calls if len(call.args) == 2]
    blocks = {name for _, by in divisions for name in by}
    return frozenset(name for length, by in divisions if not length & blocks for name in by) or None


def _named(expression: ast.expr) -> set[str]:
    """Names, and string keys as in `meta["BT"]`."""
    nodes = list(ast.walk(expression))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {node.id for node in nodes if isinstance(node, ast.Name)}


CHECKS = names(
    "torch.cuda.is_available torch.cuda.get_device_capability torch.cuda.get_device_name "
    "torch.cuda.get_device_properties torch.cuda.device_count torch.cuda.is_bf16_supported"
)


def lint_kernels(root: Path, *, select: Collection[str] = (), baseline: Path | None = None) -> LintReport:
    """Lint a file, or every Python file of a folder, for codes that start with one of `select` (empty: all).

    A file that can not be read is a finding (KL000) whatever is selected.
    Raises TraceproofError: no file, no such code, or no usable baseline.
    """
    base, paths = (
        (root.parent, [root]) if root.is_file() else (root, sorted(filter(Path.is_file, root.rglob("*.py"))))
    )
    if not paths:
        raise TraceproofError(f"{root} holds no Python files", todo="Give a file or a folder of kernels.")
    codes, findings, count = {*chosen("KL", select), "KL000"}, list[Finding](), 0
    for path in paths:
        relative = path.relative_to(base)
        try:
            text = path.read_text(encoding="utf-8-sig")
            tree, lines = parse_quietly(text), text.split("\n")
            found = findings_of(relative, tree, lines)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            findings.append(Finding("KL000", "", explain(error), relative, 1, 1))
            continue
        count += sum(1 for _ in kernels(tree))
        findings += found
        below = (base.resolve().name, *relative.parts)
        if path.name.startswith(("test_", "conftest")) or path.stem.endswith("_test") or "tests" in below:
            findings += _platform(relative, tree, lines)
    read = {"files": len(paths), "kernels": count}
    return reported((finding for finding in findings if finding.code in codes), read, baseline)


def _platform(path: Path, tree: ast.Module, lines: list[str]) -> Iterator[Finding]:
    """Tests that name the device `cuda`, or ask torch.cuda about the platform."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if _names_cuda(node):
                yield at(path, node, "KL201", ast.unparse(node)[:80], lines)
            if dotted(node.func) in CHECKS:
                yield at(path, node, "KL202", ast.unparse(node), lines)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and _is_cuda(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any("device" in ast.unparse(target).lower() for target in targets):
                yield at(path, node, "KL201", ast.unparse(node), lines)
        elif isinstance(node, ast.arguments):
            placed, kept = [*node.posonlyargs, *node.args], node.kwonlyargs
            pairs = [*zip(placed[len(placed) - len(node.defaults) :], node.defaults, strict=True)]
            for argument, default in (*pairs, *zip(kept, node.kw_defaults, strict=True)):
                if default is not None and _is_cuda(default):
                    yield at(path, default, "KL201", f"{argument.arg}={ast.unparse(default)}", lines)


def _names_cuda(call: ast.Call) -> bool:
    """Whether a call gets the device `cuda`, or is `tensor.cuda()`."""
    name, method = dotted(call.func), call.func.attr if isinstance(call.func, ast.Attribute) else ""
    devices = [keyword.value for keyword in call.keywords if keyword.arg in {"device", "device_type"}]
    if method == "to" or name in {"torch.device", "torch.autocast", "torch.get_device_module"}:
        devices += call.args
    return any(map(_is_cuda, devices)) or (method == "cuda" and not name.startswith("torch."))


def _is_cuda(node: ast.expr | None) -> bool:
    """Whether an expression is `"cuda"`, `"cuda:1"` or `f"cuda:{i}"`."""
    match node:
        case ast.Constant(value=str() as text):
            return text == "cuda" or text.startswith("cuda:")
        case ast.JoinedStr(values=[ast.Constant(value=str() as text), *_]):
            return text.startswith("cuda:")
        case _:
            return False
