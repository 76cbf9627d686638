"""Following values through a Triton kernel, statement by statement, to where memory is touched."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from traceproof.audit.findings import Finding, at
from traceproof.audit.source import dotted, last_name
from traceproof.kernel_lint.values import BARE, NOTHING, Value, evaluate, spanned

MEMORY = frozenset(
    {"load", "store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg", "make_block_ptr"}
)
MASKED = frozenset({"mask", "boundary_check"})


def kernels(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions that Triton compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_is_jit(one) for one in node.decorator_list):
            yield node


def _is_jit(decorator: ast.expr) -> bool:
    inner = decorator.func if isinstance(decorator, ast.Call) else decorator
    return dotted(inner) in {"triton.jit", "jit", "triton.experimental.gluon.jit", "gluon.jit"}


class Kernel:
    """One kernel, walked once.

    Args:
        path: for findings.
        function: the kernel.
        lines: of its file.
        partial: names of block sizes by which the file divides a length, rounding up: their last block may be
            partial. None: the file launches nothing, so any block may.
    """

    def __init__(
        self, path: Path, function: ast.FunctionDef, lines: list[str], partial: frozenset[str] | None
    ) -> None:
        self._path = path
        self._function = function
        self._lines = lines
        self._partial = partial
        self._pointers = _pointers(function)
        self._branched: dict[str, tuple[dict[str, Value], dict[str, Value], dict[str, Value]]] = {}
        self._known: dict[str, Value] = {}
        self._found: dict[tuple[int, int, str], Finding] = {}

    def findings(self) -> list[Finding]:
        """Addresses that may wrap, and blocks that may reach beyond the end."""
        self._block(self._function.body)
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
            name: first.get(name, NOTHING).merged(second.get(name, NOTHING))
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

    def _facts(self, target: ast.expr, value: ast.expr) -> Value:
        """Facts of what is assigned; an address is 64 bits wide whatever was added to it."""
        facts = evaluate(value, self._known)
        if isinstance(target, ast.Name) and target.id in self._pointers:
            return Value(blocks=facts.blocks, ranges=facts.ranges, tail=facts.tail)
        return facts

    def _assign_loop(self, target: ast.expr, iterable: ast.expr) -> None:
        if isinstance(target, ast.Name):
            arguments = iterable.args if isinstance(iterable, ast.Call) else []
            self._known[target.id] = spanned(arguments, self._known)

    def _augmented(self, node: ast.AugAssign, target: ast.Name, op: ast.operator, value: ast.expr) -> None:
        self._look(value)
        if target.id in self._pointers:
            self._addend(node, value)
        joined = ast.BinOp(ast.Name(target.id, ast.Load()), op, value)
        self._known[target.id] = self._facts(target, ast.copy_location(joined, node))

    def _look(self, expression: ast.expr) -> None:
        """Every address computed in an expression, and every access to memory."""
        inner: set[int] = set()
        for node in ast.walk(expression):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and id(node) not in inner:
                addends = list(_addends(node))
                inner |= {id(one) for one in ast.walk(node) if one is not node and isinstance(one, ast.BinOp)}
                if any(isinstance(one, ast.Name) and one.id in self._pointers for one in addends):
                    for addend in addends:
                        if not (isinstance(addend, ast.Name) and addend.id in self._pointers):
                            self._addend(addend, addend)
                inner -= {id(one) for addend in addends for one in ast.walk(addend)}
            elif isinstance(node, ast.Call):
                self._access(node)

    def _addend(self, node: ast.AST, expression: ast.expr) -> None:
        facts = evaluate(expression, self._known)
        if facts.narrow:
            how = "was multiplied in 32 bits before it was cast" if facts.wrapped else "is 32 bits wide"
            what = f"{self._function.name}: {ast.unparse(expression)} {how}, from {facts.origin}"
            self._add(node, "KL104" if facts.level == BARE and not facts.wrapped else "KL101", what)

    def _access(self, call: ast.Call) -> None:
        name = last_name(call.func)
        if name == "make_block_ptr":
            self._add(call, "KL102", f"{self._function.name}: {ast.unparse(call)[:80]}")
        if name not in {"load", "store"} or not call.args or not dotted(call.func).startswith(("tl.", "triton.")):
            return
        masked = any(keyword.arg in MASKED for keyword in call.keywords) or len(call.args) > (
            1 if name == "load" else 2
        )
        tail = evaluate(call.args[0], self._known).tail
        if not masked and (tail if self._partial is None else tail & self._partial):
            self._add(call, "KL103", f"{self._function.name}: {ast.unparse(call)[:80]}")

    def _add(self, node: ast.AST, code: str, evidence: str) -> None:
        finding = at(self._path, node, code, evidence, self._lines)
        self._found.setdefault((finding.line, finding.column, code), finding)


def partial_blocks(tree: ast.Module) -> frozenset[str] | None:
    """Names by which a file divides lengths, rounding up; None if it does so nowhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) == "cdiv" and len(node.args) == 2:
            for inner in ast.walk(node.args[1]):
                if isinstance(inner, ast.Name):
                    found.add(inner.id)
                elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    found.add(inner.value)
    return frozenset(found) or None


def _addends(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from _addends(node.left)
        yield from _addends(node.right)
    else:
        yield node


def _pointers(function: ast.FunctionDef) -> frozenset[str]:
    """Names that hold addresses: what memory is accessed through, and what those were computed from."""
    assigned: dict[str, list[ast.expr]] = {}
    waiting: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _bind(target, node.value, assigned)
        elif isinstance(node, ast.Call) and last_name(node.func) in MEMORY and node.args:
            waiting.append(node.args[0])
            waiting += [keyword.value for keyword in node.keywords if keyword.arg in {"base", "pointer"}]
    found: set[str] = set()
    while waiting:
        for leaf in _addends(waiting.pop()):
            if isinstance(leaf, ast.Name) and leaf.id not in found and _is_address(leaf.id, function, assigned):
                found.add(leaf.id)
                waiting += assigned.get(leaf.id, [])
    return frozenset(found)


def _bind(target: ast.expr, value: ast.expr, assigned: dict[str, list[ast.expr]]) -> None:
    if isinstance(target, ast.Name):
        assigned.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=False):
            _bind(one, other, assigned)


def _is_address(name: str, function: ast.FunctionDef, assigned: dict[str, list[ast.expr]], depth: int = 8) -> bool:
    """Whether a name in an address is the base, not an offset: a parameter, or computed from one by adding.

    A parameter that is multiplied, compared or constexpr is a size.
    """
    parameters = {arg.arg: arg for arg in function.args.args}
    if name in parameters:
        annotation = parameters[name].annotation
        constexpr = annotation is not None and "constexpr" in ast.unparse(annotation)
        return not constexpr and not _is_size(name, function)
    values = assigned.get(name, [])
    return depth > 0 and any(
        isinstance(leaf, ast.Name) and leaf.id != name and _is_address(leaf.id, function, assigned, depth - 1)
        for value in values
        for leaf in _addends(value)
        if not isinstance(value, ast.Call)
    )


def _is_size(name: str, function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add | ast.Sub):
            sides = (node.left, node.right)
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)  # type: ignore[assignment]
            if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
                continue
        else:
            continue
        if any(isinstance(side, ast.Name) and side.id == name for side in sides):
            return True
    return False
