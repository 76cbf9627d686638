"""Definitions cut down to sizes that a small machine can run."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError


def cut(definition: Definition, sizes: Mapping[str, int]) -> Definition:
    """The definition with other sizes of const axes, in its reference as well.

    A whole number in the reference that is an axis' old size becomes the new one, unless another axis of that old
    size keeps it.

    Raises:
        TraceproofError: there is no such const axis.
    """
    unknown = sorted(sizes.keys() - definition.const_axes.keys())
    if unknown:
        raise TraceproofError(
            f"{definition.name} can not be cut", problems=[f"no const axis {n}" for n in unknown]
        )
    found: dict[int, set[int]] = {}
    for name, old in definition.const_axes.items():
        found.setdefault(old, set()).add(sizes.get(name, old))
    numbers = {old: next(iter(new)) for old, new in found.items() if len(new) == 1}
    tree = ast.parse(definition.reference)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            node.value = numbers.get(node.value, node.value)
    changed = definition.as_json() | {"reference": ast.unparse(tree)}
    for name, size in sizes.items():
        changed["axes"][name]["value"] = size
    return Definition.model_validate(changed)


def parsed(words: list[str]) -> dict[str, int]:
    """`axis=size` words as a mapping.

    Raises:
        TraceproofError: a word is none.
    """
    sizes = {}
    for word in words:
        name, _, size = word.partition("=")
        if not size.isdecimal():
            raise TraceproofError(f"{word!r} is not an axis and a size", todo="Write it as hidden_size=512.")
        sizes[name] = int(size)
    return sizes
