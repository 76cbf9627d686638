"""Constants that a definition's schema can not express, read from its reference's syntax tree."""

import ast
from collections.abc import Mapping
from functools import cache

from traceproof.dataset.definition import Definition


def named_constants(definition: Definition) -> dict[str, int | float]:
    """Numbers assigned to a plain name anywhere in the reference (`EPS = 1e-6`), the name in lower case.

    A name that is assigned two different numbers is left out: no one value can be told.
    """
    return dict(_named(definition.reference))


@cache
def _named(reference: str) -> Mapping[str, int | float]:
    """Read once per reference: ground truths ask in each call, whose time is measured."""
    found: dict[str, set[int | float]] = {}
    for node in ast.walk(ast.parse(reference)):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        number = _number(value)
        if number is None:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                found.setdefault(target.id.lower(), set()).add(number)
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


def _number(node: ast.expr) -> int | float | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
