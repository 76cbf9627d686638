"""A scaled-down definition: the same reference with smaller const axes, judged where the definition does not fit.

The reference's text is never changed. So an axis whose size its text states keeps that size, and a reference that
states all of them is not scaled down.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from traceproof.dataset.constants import numbers
from traceproof.dataset.constraints import evaluate, with_axes
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.op import Op

PREFIX = "scaled-down-"  # how the ids of its cases begin
NEAR = 1e-3  # relative distance at which a number of the text counts as one that follows from a size


@dataclass(frozen=True, slots=True)
class ScaledDown:
    """The definition with smaller const axes, and the axes with their old and new sizes."""

    definition: Definition
    sizes: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        """`hidden_size 7168 -> 512, num_experts 256 -> 32`."""
        return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in self.sizes.items())


def scaled_down_of(definition: Definition, op: Op) -> ScaledDown | str:
    """A definition scaled down, or why it is not."""
    stated = dict(_stated(definition))
    wanted = op.smaller(definition, stated.keys())
    old = definition.const_axes
    sizes = {name: (old[name], new) for name, new in wanted.items() if new < old[name]}
    if not sizes:
        lines = ", ".join(f"{name} {old[name]} (line {line})" for name, line in stated.items())
        return f"the reference's text states {lines}" if stated else "none of its axes may be smaller"
    scaled_down = ScaledDown(_resized(definition, {name: new for name, (_, new) in sizes.items()}), sizes)
    broken = [text for text in definition.constraints or () if _broken(text, scaled_down.definition)]
    if broken:
        return f"the constraint {broken[0]!r} does not hold with {scaled_down}"
    _, unknown = registry.for_definition(scaled_down.definition)
    return scaled_down if unknown is None else f"with {scaled_down} there is no oracle: {unknown}"


def _resized(definition: Definition, sizes: Mapping[str, int]) -> Definition:
    changed = definition.as_json()
    for name, size in sizes.items():
        changed["axes"][name]["value"] = size
    return Definition.model_validate(changed)


def _broken(constraint: str, definition: Definition) -> bool:
    """Whether a constraint over const axes alone is false."""
    return evaluate(with_axes(constraint, definition), definition.const_axes) is False


def _stated(definition: Definition) -> Iterator[tuple[str, int]]:
    """Const axes of more than one element that a number of the reference follows from, with its first line."""
    for name, size in definition.const_axes.items():
        lines = [line for value, line in numbers(definition) if size > 1 and _follows(value, size)]
        if lines:
            yield name, min(lines)


def _follows(number: float, size: int) -> bool:
    """Whether a number is a size, or of floating point and its root or the reciprocal of one of them."""
    if isinstance(number, int):
        return number == size
    return any(abs(number * base - 1) < NEAR or abs(number - base) < NEAR * base for base in (size, size**0.5))
