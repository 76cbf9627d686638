"""Whether a mutant computes the same function as its reference, rounding aside.

`weights.sum() * 1` or another shape of the same product gives other bits and no other mathematics. Both sources
are widened to float64 in all that they say of dtypes, and so are the inputs: what then agrees to nine digits on
every input tried is the same function. What changes a dtype can not be told this way.
"""

from __future__ import annotations

import ast

import torch

from traceproof.ops.base import Tensors, Values

NARROW = frozenset({"float32", "float16", "bfloat16"})
CASTS = frozenset({"float", "half", "bfloat16"})
DIGITS = 1e-9  # of a row's largest value; float64 sums of this length agree to twelve


def widened(source: str) -> str:
    """The source with float64 for every wider float that it names; eight-bit floats are storage and stay."""
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if id(node) in called and node.attr in CASTS:
                node.attr = "double"
            elif id(node) not in called and node.attr in NARROW:
                node.attr = "float64"
    return ast.unparse(tree)


def wide_inputs(inputs: Values) -> Values:
    """The inputs in float64, but for integers and eight-bit floats."""
    return {name: _wide(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.dtype.is_floating_point and value.dtype.itemsize > 1 else value


def same_function(outputs: Tensors, original: Tensors) -> bool:
    """Outputs of widened sources agree to nine digits of their rows' largest values; NaN and infinities agree."""
    return outputs.keys() == original.keys() and all(
        _agrees(value, original[name]) for name, value in outputs.items()
    )


def _agrees(value: torch.Tensor, expected: torch.Tensor) -> bool:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    if not value.numel() or not value.dtype.is_floating_point:
        return torch.equal(value, expected)
    one, other = value.double(), expected.double()
    finite = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(torch.isnan(one), torch.isnan(other)):
        return False
    if bool(((one != other) & ~finite & ~torch.isnan(one)).any()):
        return False
    zero = torch.zeros((), dtype=torch.float64)
    size = torch.where(finite, other.abs(), zero)
    largest = size.amax(-1, keepdim=True) if size.dim() else size
    return bool((torch.where(finite, (one - other).abs(), zero) <= DIGITS * largest).all())
