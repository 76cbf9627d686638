"""Following values through a Triton kernel, statement by statement, to where memory is touched."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from traceproof.audit.findings import Finding, at
from traceproof.audit.source import dotted, last_name
from traceproof.kernel_lint.addresses import pointers
from traceproof.kernel_lint.values import BARE, NOTHING, Known, Value, addends, bounded, evaluate, spanned, text_of

CALLS = 3  # helpers of helpers; nothing here goes deeper
NO_FACTS: Known = MappingProxyType({})
MASKED = frozenset({"mask", "boundary_check"})


def kernels(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions that Triton compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_is_jit(one) for one in node.decorator_list):
            yield node


def _is_jit(decorator: ast.expr) -> bool:
    inner = decorator.func if isinstance(decorator, ast.Call) else decorator
    return dotted(inner) in {"triton.jit", "jit", "triton.experimental.gluon.jit", "gluon.jit"}


def _parameters(function: ast.FunctionDef, pointers: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Parameters that are known when a kernel is compiled, and numbers that it is given when it is launched."""
    constants, numbers = set[str](), set[str]()
    for argument in function.args.args:
        constexpr = argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
        if argument.arg not in pointers:
            (constants if constexpr else numbers).add(argument.arg)
    return frozenset(constants), frozenset(numbers)


class Kernel:
    """One kernel, walked once."""

    def __init__(
        self,
        path: Path,  # for findings
        function: ast.FunctionDef,  # the kernel
        lines: list[str],  # of its file
        # names of block sizes by which the file divides a length, rounding up: their last block may be partial.
        # None: the file launches nothing, so any block may.
        partial: frozenset[str] | None,
        given: Known = NO_FACTS,  # facts of parameters, where another kernel calls this one
    ) -> None:
        self._path = path
        self._function = function
        self._lines = lines
        self._partial = partial
        self._pointers = pointers(function) - {name for name, value in given.items() if value.grid}
        self._branched: dict[str, tuple[dict[str, Value], dict[str, Value], dict[str, Value]]] = {}
        self._constants, numbers = _parameters(function, self._pointers)
        self._known: dict[str, Value] = {name: Value(runtime=True) for name in numbers} | dict(given)
        # calls of plain names, with the facts of their arguments in order and by name
        self.calls: list[tuple[str, list[Value], dict[str, Value]]] = []
        self._found: dict[tuple[int, int, str], Finding] = {}
        self._unmasked: list[tuple[ast.Call, Value]] = []
        self._guards: set[frozenset[str]] = set()  # sums that the kernel compares with a length somewhere
        self._counting = _counting(function) | (partial or frozenset())

    def findings(self) -> list[Finding]:
        """Addresses that may wrap, and blocks that may reach beyond the end."""
        self._block(self._function.body)
        for call, address in self._unmasked:
            launched = address.tail if self._partial is None else address.tail & self._partial
            if launched or any(guard <= address.spans for guard in self._guards):
                self._add(call, "KL103", f"{self._function.name}: {ast.unparse(call)[:80]}")
        return sorted(self._found.values())

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                self._look(value)
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._look(value)
                self._assign(target, value)
            case ast.AugAssign(target=ast.Name() as target, op=op, value=value):
                self._augmented(statement, target, op, value)
            case ast.If(test=test, body=body, orelse=orelse):
                self._look(test)
                self._branches(test, body, orelse)
            case ast.For(target=target, iter=iterable, body=body):
                self._look(iterable)
                self._assign_loop(target, iterable)
                self._block(body)
                self._block(body)  # once more: what the first turn assigns is known in the second
            case ast.While(body=body) | ast.With(body=body):
                self._block(body)
                self._block(body)
            case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
                self._look(value)
            case _:
                pass

    def _branches(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        """Both ways; where the same test was met before, each way knows what it left there."""
        before, key = dict(self._known), ast.unparse(test)
        taken, other, joined = self._branched.get(key, ({}, {}, {}))
        same = {name for name, value in joined.items() if before.get(name) is value}
        self._known = {**before, **{name: taken[name] for name in same if name in taken}}
        self._block(body)
        first = self._known
        self._known = {**before, **{name: other[name] for name in same if name in other}}
        self._block(orelse)
        second = self._known
        self._known = {
            name: _joined(first.get(name, NOTHING), second.get(name, NOTHING))
            for name in first.keys() | second.keys()
        }
        self._branched[key] = (first, second, dict(self._known))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            found = [(one, self._facts(one, other)) for one, other in zip(target.elts, value.elts, strict=False)]
            for one, facts in found:  # all are evaluated before any is bound
                if isinstance(one, ast.Name):
                    self._known[one.id] = facts
        elif isinstance(target, ast.Name):
            self._known[target.id] = self._facts(target, value)

    def _facts(self, target: ast.expr, value: ast.expr, known: Known | None = None) -> Value:
        """Facts of what is assigned; an address is 64 bits wide whatever was added to it."""
        facts = evaluate(value, self._known if known is None else known)
        if isinstance(target, ast.Name) and target.id in self._pointers:
            return Value(blocks=facts.blocks, ranges=facts.ranges, tail=facts.tail, spans=facts.spans)
        return facts

    def _assign_loop(self, target: ast.expr, iterable: ast.expr) -> None:
        if isinstance(target, ast.Name):
            arguments = iterable.args if isinstance(iterable, ast.Call) else []
            found = spanned(arguments, self._known)
            if not found.grid and not bounded(arguments, self._constants):
                found = replace(found, looped=True, origin=f"the loop variable in line {iterable.lineno}")
            self._known[target.id] = found

    def _augmented(self, node: ast.AugAssign, target: ast.Name, op: ast.operator, value: ast.expr) -> None:
        self._look(value)
        if target.id in self._pointers:
            self._addend(node, value)
        sum_ = ast.copy_location(ast.BinOp(ast.Name(target.id, ast.Load()), op, value), node)
        before = self._known.get(target.id)
        self._known[target.id] = after = self._facts(target, sum_)
        for taken, other, joined in self._branched.values():
            if before is not None and joined.get(target.id) is before:  # each way's own value moves along
                joined[target.id] = after
                for way in (taken, other):
                    mine = way.get(target.id, NOTHING)
                    known = {**self._known, target.id: mine}
                    way[target.id] = after if mine is before else self._facts(target, sum_, known)

    def _look(self, expression: ast.expr) -> None:
        """Every address computed in an expression, and every access to memory."""
        inner: set[int] = set()
        for node in ast.walk(expression):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and id(node) not in inner:
                terms = list(addends(node))
                inner |= {id(one) for one in ast.walk(node) if isinstance(one, ast.BinOp)}
                offsets = [one for one in terms if not (isinstance(one, ast.Name) and one.id in self._pointers)]
                for addend in offsets if len(offsets) < len(terms) else ():
                    self._addend(addend, addend)
                inner -= {id(one) for addend in terms for one in ast.walk(addend)}
            elif isinstance(node, ast.Call):
                self._access(node)
            elif isinstance(node, ast.Compare):
                self._guard(node)

    def _addend(self, node: ast.AST, expression: ast.expr) -> None:
        facts = evaluate(expression, self._known)
        if facts.narrow:
            how = "was multiplied in 32 bits before it was cast" if facts.wrapped else "is 32 bits wide"
            what = f"{self._function.name}: {ast.unparse(expression)} {how}, from {facts.origin}"
            self._add(node, "KL104" if facts.level == BARE and not facts.wrapped else "KL101", what)

    def _access(self, call: ast.Call) -> None:
        name = last_name(call.func)
        if isinstance(call.func, ast.Name):
            keywords = {one.arg: evaluate(one.value, self._known) for one in call.keywords if one.arg}
            self.calls.append((name, [evaluate(one, self._known) for one in call.args], keywords))
        if name == "make_block_ptr":
            self._add(call, "KL102", f"{self._function.name}: {ast.unparse(call)[:80]}")
        if name not in {"load", "store"} or not call.args or not dotted(call.func).startswith(("tl.", "triton.")):
            return
        masked = any(keyword.arg in MASKED for keyword in call.keywords) or len(call.args) > (
            1 if name == "load" else 2
        )
        if not masked:
            self._unmasked.append((call, evaluate(call.args[0], self._known)))

    def _guard(self, node: ast.Compare) -> None:
        """A block held against a length, as masks do; two blocks against each other say nothing of an end."""
        if not isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            return
        sides = [(one, evaluate(one, self._known)) for one in (node.left, *node.comparators)]
        blocks = [one for one, facts in sides if facts.spans]
        others = {
            name.id
            for one, facts in sides
            if not facts.spans
            for name in ast.walk(one)
            if isinstance(name, ast.Name)
        }
        if len(blocks) == 1 and not others & self._counting:
            self._guards.add(frozenset(text_of(one) for one in addends(blocks[0])))

    def _add(self, node: ast.AST, code: str, evidence: str) -> None:
        finding = at(self._path, node, code, evidence, self._lines)
        self._found.setdefault((finding.line, finding.column, code), finding)


def _joined(one: Value, other: Value) -> Value:
    """Of two ways; the value itself where both have it, since it is known again by its identity."""
    return one if one is other else one.merged(other)


def _counting(function: ast.FunctionDef) -> frozenset[str]:
    """Names that are no length: sizes of blocks, and what loops count."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and last_name(node.func) == "arange":
            found |= {inner.id for one in node.args for inner in ast.walk(one) if isinstance(inner, ast.Name)}
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


def findings_of(path: Path, tree: ast.Module, lines: list[str]) -> Iterator[Finding]:
    """Findings of every kernel of a file, and of its helpers with the arguments that kernels give them."""
    partial, found = partial_blocks(tree), list(kernels(tree))
    helpers = {function.name: function for function in found}
    seen: set[Finding] = set()
    for function in found:
        waiting: list[tuple[ast.FunctionDef, Known, int]] = [(function, NO_FACTS, 0)]
        while waiting:
            one, given, depth = waiting.pop()
            kernel = Kernel(path, one, lines, partial, given)
            seen |= set(kernel.findings())
            for name, values, keywords in kernel.calls if depth < CALLS else ():
                if name in helpers and any(value.grid for value in (*values, *keywords.values())):
                    parameters = [argument.arg for argument in helpers[name].args.args]
                    facts = {**dict(zip(parameters, values, strict=False)), **keywords}
                    waiting.append((helpers[name], facts, depth + 1))
    yield from sorted(seen)


def partial_blocks(tree: ast.Module) -> frozenset[str] | None:
    """Names by which a file divides lengths, rounding up; None if it does so nowhere. Blocks hold whole blocks."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and last_name(node.func) == "cdiv")
    found = [(_named(call.args[0]), _named(call.args[1])) for call in calls if len(call.args) == 2]
    blocks = {name for _, by in found for name in by}
    return frozenset(name for length, by in found if not length & blocks for name in by) or None


def _named(expression: ast.expr) -> set[str]:
    """Names, and keys as in `meta["BT"]`."""
    nodes = list(ast.walk(expression))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {node.id for node in nodes if isinstance(node, ast.Name)}
