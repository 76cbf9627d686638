"""What single pieces of Python syntax say: names that they change, dotted names, assignments."""

import ast

MUTATORS = frozenset({"append", "add", "update", "setdefault", "insert", "extend", "register", "__setitem__"})
CONTAINER = MUTATORS - {"register"}


def names_changed(node: ast.stmt) -> set[str] | None:
    """The names whose content a statement changes, and does nothing else; None: it may do more.

    A loop over a table and its items counts for the table.
    """
    match node:
        case ast.Assign(targets=targets):
            roots = [_root(target) for target in targets]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            roots = [_root(target)]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr))) if attr in CONTAINER:
            roots = [name]
        case ast.For(target=target, iter=over, body=body, orelse=[]):
            return _changed_by_loop(target, over, body)
        case ast.Delete(targets=targets):
            roots = [_root(target) for target in targets]
        case _:
            return None
    return None if None in roots else {root for root in roots if root}


def _changed_by_loop(target: ast.expr, over: ast.expr, body: list[ast.stmt]) -> set[str] | None:
    names: set[str] = set()
    for part in body:
        inner = names_changed(part)
        if inner is None:
            return None
        names |= inner
    items = {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    if names & items:
        names |= {one.id for one in ast.walk(over) if isinstance(one, ast.Name)}
    return names - items


def _root(target: ast.expr) -> str | None:
    """The name whose content an assignment to `target` changes; `cast(T, name)` is the name."""
    while True:
        match target:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                target = inner
            case ast.Call(func=ast.Name(id="cast"), args=[_, inner]):
                target = inner
            case _:
                break
    return target.id if isinstance(target, ast.Name) else None


def is_plain(target: ast.expr) -> bool:
    """Whether an assignment to it binds nothing but names."""
    return isinstance(target, ast.Name) or (
        isinstance(target, ast.Tuple | ast.List) and all(isinstance(one, ast.Name) for one in target.elts)
    )


def is_literal_assignment(node: ast.AST) -> bool:
    """Whether it assigns a constant, or a tuple."""
    return isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.Tuple)


def dump(node: ast.AST) -> str:
    """A node's syntax without its docstring."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.body:
        match node.body[0]:
            case ast.Expr(value=ast.Constant(value=str())):
                return ast.dump(type(node)(**{**dict(ast.iter_fields(node)), "body": node.body[1:]}))
    return ast.dump(node)
