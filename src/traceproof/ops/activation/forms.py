"""Which activation a definition's reference applies: the schema has no place for it, so it stands in the code."""

import ast
from functools import cache

from traceproof.dataset.definition import Definition

SILU, GELU, TANH = "silu", "gelu", "gelu_tanh"
# Functions of PyTorch by which a reference names its activation; an approximation by tanh is a keyword of gelu.
NAMED = {"silu": SILU, "sigmoid": SILU, "gelu": GELU, "erf": GELU, "tanh": TANH}


def activation_of(definition: Definition) -> str | None:
    """`silu`, `gelu` (by the error function) or `gelu_tanh`; None: the reference calls none, or several."""
    return _activation(definition.reference)


@cache
def _activation(reference: str) -> str | None:
    found = set()
    for node in ast.walk(ast.parse(reference)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in NAMED:
            continue
        by_tanh = any(
            keyword.arg == "approximate"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value == "tanh"
            for keyword in node.keywords
        )
        found.add(TANH if by_tanh else NAMED[name])
    return found.pop() if len(found) == 1 else None
