"""A reference's `run`, read off its syntax tree without running it.

Everything here is by name and by line: good enough for straight code with loops, which references are. Where a
name's origin is unclear the answer is "unknown", so that a rule stays silent.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeGuard

from traceproof.dataset.constraints import evaluate
from traceproof.files import parse_quietly
from traceproof.text import names

# Methods whose result shares memory with the tensor (reshape: mostly).
VIEWS = names(
    "view reshape transpose permute squeeze unsqueeze expand t view_as detach flatten unflatten narrow select"
)
VIEW_ATTRIBUTES = frozenset({"T", "mT", "data"})
# Methods whose result holds the same values, in other memory, another dtype or another shape.
COPIES = VIEWS | names("clone contiguous to float double half bfloat16 type type_as cpu cuda")
NOT_IN_PLACE = frozenset({"requires_grad_", "share_memory_"})  # end in _ and change no values
SHAPE_ONLY = names("shape size device dtype ndim dim numel stride is_contiguous is_cuda element_size")

Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


class ReturnStatement(NamedTuple):
    """A return statement: its values (one, or those of a tuple), its line, and its source."""

    values: tuple[ast.expr, ...]
    is_tuple: bool
    line: int
    source: str


@dataclass(frozen=True)
class Reference:
    """A parsed reference; line numbers are within its text, from 1."""

    module: ast.Module
    run: ast.FunctionDef

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Parse a reference that the definition's model already accepted; the last `run` counts."""
        module = parse_quietly(text)
        runs = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
        return cls(module, runs[-1])

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the whole text, outer ones first."""
        return tuple(ast.walk(self.module))

    @cached_property
    def own_nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of run's body in source order, functions and classes inside it left out."""
        found: list[ast.AST] = []
        pending: list[ast.AST] = list(reversed(self.run.body))
        while pending:
            node = pending.pop()
            found.append(node)
            if not isinstance(node, Functions):
                pending += reversed(list(ast.iter_child_nodes(node)))
        return tuple(found)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of run's parameters in call order."""
        arguments = self.run.args
        return tuple(one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))

    @cached_property
    def variadic(self) -> bool:
        """Whether run takes *args or **kwargs."""
        return self.run.args.vararg is not None or self.run.args.kwarg is not None

    @cached_property
    def returns(self) -> tuple[ReturnStatement, ...]:
        """The return statements of run itself, not of functions inside it."""
        found = []
        for node in self.own_nodes:
            if isinstance(node, ast.Return):
                is_tuple = isinstance(node.value, ast.Tuple)
                values = node.value.elts if isinstance(node.value, ast.Tuple) else filter(None, [node.value])
                found.append(ReturnStatement(tuple(values), is_tuple, node.lineno, ast.unparse(node)))
        return tuple(found)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names that run reads in any way."""
        return frozenset(node.id for node in ast.walk(self.run) if _is_load(node))

    @cached_property
    def value_reads(self) -> frozenset[str]:
        """Names whose values run reads: more than a shape, a dtype, or a check in an assert."""
        ignored: set[int] = set()
        for node in ast.walk(self.run):
            if isinstance(node, ast.Assert):
                ignored |= {id(below) for below in ast.walk(node)}
            if isinstance(node, ast.Attribute) and node.attr in SHAPE_ONLY:
                ignored.add(id(node.value))
        return frozenset(node.id for node in ast.walk(self.run) if _is_load(node) and id(node) not in ignored)

    @cached_property
    def assignments(self) -> dict[str, list[tuple[int, ast.expr | None]]]:
        """For each name, the lines where run binds it and to what; None where that is unclear."""
        found: dict[str, list[tuple[int, ast.expr | None]]] = {}
        for node in self.own_nodes:
            for name, value in _bindings(node):
                found.setdefault(name, []).append((getattr(node, "lineno", self.run.lineno), value))
        for entries in found.values():
            entries.sort(key=lambda entry: entry[0])
        return found

    @cached_property
    def changes(self) -> tuple[tuple[str, int, str], ...]:
        """In-place changes in run: the local name that each goes through, the statement's line, and its source."""
        changed = ((root(target), node) for node in self.own_nodes for target in _changed(node))
        return tuple(
            (name, node.lineno, ast.unparse(node))  # type: ignore[attr-defined]
            for name, node in changed
            if name is not None
        )

    def origin(self, name: str, line: int) -> str | None:
        """The parameter whose memory `name` means just before `line`; None if it is none or unclear."""
        before = [entry for entry in self.assignments.get(name, ()) if entry[0] < line]
        if not before:
            return name if name in self.parameters else None
        at, value = before[-1]
        source = root(value) if value is not None else None
        return self.origin(source, at) if source is not None else None

    def copied(self, node: ast.expr, line: int) -> str | None:
        """The parameter whose values `node` holds unchanged at `line`; None if it is none or unclear."""
        name = root(node, through=COPIES)
        if name is None or name in {changed for changed, _, _ in self.changes}:
            return None
        bound = [entry for entry in self.assignments.get(name, ()) if entry[0] < line]
        if not bound:
            return name if name in self.parameters else None
        if len(bound) > 1 or bound[0][1] is None:
            return None
        return self.copied(bound[0][1], bound[0][0])

    @cached_property
    def unpacks(self) -> tuple[tuple[str, tuple[str, ...], str], ...]:
        """Unpacked shapes of parameters: (parameter, names, source); a target that is no name is empty."""
        found = []
        for node in self.own_nodes:
            match node:
                case ast.Assign(
                    targets=[ast.Tuple(elts=elements)],
                    value=ast.Attribute(value=ast.Name(id=parameter), attr="shape"),
                ) if parameter in self.parameters and not any(isinstance(one, ast.Starred) for one in elements):
                    targets = tuple(one.id if isinstance(one, ast.Name) else "" for one in elements)
                    found.append((parameter, targets, ast.unparse(node)))
        return tuple(found)

    @cached_property
    def shape_names(self) -> dict[str, tuple[str, int]]:
        """Local names that stand for one dimension of a parameter: name -> (parameter, index).

        A name that is bound in any other way as well is left out.
        """
        found = {
            name: (parameter, index)
            for parameter, targets, _ in self.unpacks
            for index, name in enumerate(targets)
        }
        for node in self.own_nodes:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Subscript(value=ast.Attribute(value=ast.Name(id=parameter), attr="shape"), slice=at),
                ) if parameter in self.parameters:
                    index = evaluate(at, {})
                    found |= {name: (parameter, index)} if isinstance(index, int) else {}
        return {name: where for name, where in found.items() if len(self.assignments.get(name, ())) == 1}

    @cached_property
    def asserts(self) -> tuple[ast.expr, ...]:
        """Conditions that run asserts, conjunctions split."""
        found: list[ast.expr] = []
        for node in self.own_nodes:
            if isinstance(node, ast.Assert):
                both = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
                found += node.test.values if both else [node.test]  # type: ignore[attr-defined]
        return tuple(found)


def root(node: ast.expr | None, through: frozenset[str] = VIEWS) -> str | None:
    """The name at the bottom of indexing, views and the methods in `through`; None for any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Subscript(value=inner, slice=index):
            whole = ast.unparse(index) in {":", "..."}
            return root(inner, through) if through is VIEWS or whole else None
        case ast.Attribute(value=inner, attr=attr) if attr in VIEW_ATTRIBUTES:
            return root(inner, through)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="clone"), args=[inner]):
            return root(inner, through) if through is COPIES else None
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in through:
            return root(inner, through)
    return None


def _is_load(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a statement binds, with the value where it is one name to one expression."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _target(target, value)
        case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            yield from _target(target, value)
        case ast.For(target=ast.Name(id=name), iter=source):
            yield name, source if root(source) is not None else None  # rows of a tensor are views of it
        case ast.For(target=target) | ast.comprehension(target=target):
            yield from _target(target, None)
        case ast.With(items=items):
            for item in items:
                if item.optional_vars is not None:
                    yield from _target(item.optional_vars, None)


def _target(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _target(element, None)


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions whose memory a statement or a call changes."""
    match node:
        case ast.Assign(targets=targets):
            yield from (target for target in targets if isinstance(target, ast.Subscript))
        case ast.AugAssign(target=target):
            yield target
        case ast.Call(func=ast.Attribute(value=owner, attr=attr), keywords=keywords):
            if attr.endswith("_") and not attr.startswith("_") and attr not in NOT_IN_PLACE:
                yield owner
            yield from (keyword.value for keyword in keywords if keyword.arg == "out")
