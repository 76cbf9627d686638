"""Which names of a module are locals of a function, so that they can never mean a builtin of the same name.

A function's local or an argument is bound in its function or an enclosing one, or raises; names of a module and
of a class body fall back to builtins, so those are never counted.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True, slots=True)
class _Scope:
    """A module, class body (neither `safe`), function or comprehension, with what it binds."""

    bound: frozenset[str]
    outward: frozenset[str] = frozenset()  # declared global: looked up in the module
    safe: bool = True


MODULE = _Scope(frozenset(), safe=False)


def locals_of(tree: ast.Module) -> frozenset[int]:
    """`id` of every `ast.Name` that is a local of a function around it. Raises RecursionError: too deep."""
    return frozenset(_walk(tree.body, (MODULE,)))


def _walk(nodes: Iterable[ast.AST | None], scopes: tuple[_Scope, ...]) -> Iterator[int]:
    for node in nodes:
        match node:
            case None:
                continue
            case ast.Name():
                if _is_local(node.id, scopes):
                    yield id(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _walk(_outside(node), scopes)
                body = node.body if isinstance(node.body, list) else [node.body]
                yield from _walk(body, (*scopes, _function_scope(node, body)))
            case ast.ClassDef():
                yield from _walk([*node.decorator_list, *node.bases, *node.keywords], scopes)
                bound = frozenset(_bound(node.body))
                yield from _walk(node.body, (*scopes, _Scope(bound, _declared(node.body, ast.Global), safe=False)))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                yield from _comprehension(node, scopes)
            case _:
                yield from _walk(ast.iter_child_nodes(node), scopes)


def _is_local(name: str, scopes: tuple[_Scope, ...]) -> bool:
    for depth, scope in enumerate(reversed(scopes)):
        if name in scope.outward:
            return False
        if name in scope.bound and scope.safe:
            return True
        if name in scope.bound and not depth:
            return False  # of a class body itself; functions inside look past it
    return False


def _comprehension(node: Comprehension, scopes: tuple[_Scope, ...]) -> Iterator[int]:
    first, *_ = node.generators
    yield from _walk([first.iter], scopes)  # of all its parts, this one is not inside
    inside = (*scopes, _Scope(frozenset(_bound([generator.target for generator in node.generators]))))
    for generator in node.generators:
        yield from _walk([generator.target, *generator.ifs], inside)
        if generator is not first:
            yield from _walk([generator.iter], inside)
    yield from _walk([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], inside)


def _outside(node: Function) -> Iterator[ast.AST | None]:
    """What is evaluated where a function is defined: decorators, defaults, annotations."""
    arguments = node.args
    yield from (*arguments.defaults, *arguments.kw_defaults)
    if not isinstance(node, ast.Lambda):
        yield from (*node.decorator_list, node.returns)
        yield from (argument.annotation for argument in _arguments(arguments))


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    starred = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def _function_scope(node: Function, body: list[ast.stmt] | list[ast.expr]) -> _Scope:
    bound = {argument.arg for argument in _arguments(node.args)} | set(_bound(body))
    outward = _declared(body, ast.Global)
    return _Scope(frozenset(bound - outward - _declared(body, ast.Nonlocal)), outward)


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that code assigns in its own scope; of a comprehension, what `:=` assigns."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, Comprehension):
            yield from (one.target.id for one in ast.walk(node) if isinstance(one, ast.NamedExpr))
        elif not isinstance(node, Function | ast.ClassDef):
            yield from _bound(ast.iter_child_nodes(node))


def _declared(nodes: Iterable[ast.AST], kind: type[ast.Global | ast.Nonlocal]) -> frozenset[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            found |= set(node.names) if isinstance(node, kind) else set()
        elif not isinstance(node, Function | ast.ClassDef):
            found |= _declared(ast.iter_child_nodes(node), kind)
    return frozenset(found)
