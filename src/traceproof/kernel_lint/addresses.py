"""Which names of a kernel hold addresses, and which hold offsets or sizes."""

import ast

from traceproof.audit.source import last_name
from traceproof.kernel_lint.values import addends
from traceproof.text import names

MEMORY = names("load store atomic_add atomic_max atomic_min atomic_cas atomic_xchg make_block_ptr")


def pointers(function: ast.FunctionDef) -> frozenset[str]:
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
        for leaf in addends(waiting.pop()):
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
        for leaf in addends(value)
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
