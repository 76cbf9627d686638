"""A scaled-down definition: the same reference with smaller const axes, judged where the definition does not fit.

An axis whose size the reference computes with as a number keeps that size; a number in an assert changes with its
axis. Where no axis is left, all whole numbers that are sizes change with their axes: a pass then counts like any
other, a failure says nothing.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from traceproof.dataset.constants import numbers, renumbered
from traceproof.dataset.constraints import broken
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.op import SCALED_DOWN_LEAST, Op

PREFIX = "scaled-down-"  # how the ids of its cases begin
NEAR = 1e-3  # relative distance at which a number of the text counts as one that follows from a size


@dataclass(frozen=True, slots=True)
class ScaledDown:
    """The definition with smaller const axes, and the axes with their old and new sizes."""

    definition: Definition
    sizes: Mapping[str, tuple[int, int]]
    renumbered: bool = False  # whether numbers that the reference computes with are others

    def __str__(self) -> str:
        """`hidden_size 7168 -> 512, num_experts 256 -> 32`."""
        sizes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in self.sizes.items())
        return f"{sizes}, in the reference's text, too" if self.renumbered else sizes


def scaled_down_of(definition: Definition, op: Op) -> ScaledDown | str:
    """A definition scaled down, or the reason why it can not be."""
    stated, old = dict(_stated(definition)), definition.const_axes

    def smaller(fixed: Collection[str]) -> dict[str, tuple[int, int]]:
        return {name: (old[name], new) for name, new in op.smaller(definition, fixed).items() if new < old[name]}

    sizes = smaller(stated)
    computes = not sizes  # whether numbers change that the reference computes with, not in its asserts alone
    if computes:  # a small number may be anything; a large one is the size of its axis
        sizes = smaller(
            [name for name in stated if old[name] < SCALED_DOWN_LEAST or name not in _whole(definition)]
        )
    text = renumbered(definition, {})
    changes = {size: new for size, new in sizes.values() if renumbered(definition, {size: new}) != text}
    for name, size in old.items():
        if size in changes and changes[size] != sizes.get(name, (0, size))[1]:
            return (
                f"the reference's text states {size}, the size of {name} and of an axis that would get another one"
            )
    if not sizes:
        lines = ", ".join(f"{name} {old[name]} (line {line})" for name, line in stated.items())
        return f"the reference's text states {lines}" if stated else "none of its axes may be smaller"
    changed = definition.as_json() | ({"reference": renumbered(definition, changes)} if changes else {})
    for name, (_, new) in sizes.items():
        changed["axes"][name]["value"] = new
    made = Definition.model_validate(changed)
    scaled_down = ScaledDown(made, sizes, renumbered=computes)
    if (constraint := broken(made, {})) is not None:
        return f"the constraint {constraint!r} does not hold with {scaled_down}"
    _, unknown = registry.for_definition(scaled_down.definition)
    return scaled_down if unknown is None else f"with {scaled_down} there is no oracle: {unknown}"


def _stated(definition: Definition) -> Iterator[tuple[str, int]]:
    """Const axes of more than one element that a number of the reference follows from, with its first line."""
    for name, size in definition.const_axes.items():
        lines = [line for value, line in numbers(definition) if size > 1 and _follows(value, size)]
        if lines:
            yield name, min(lines)


def _whole(definition: Definition) -> set[str]:
    """Const axes from whose size no floating-point number of the reference follows."""
    floats = [number for number, _ in numbers(definition) if isinstance(number, float)]
    sizes = definition.const_axes.items()
    return {name for name, size in sizes if not any(_follows(number, size) for number in floats)}


def _follows(number: float, size: int) -> bool:
    """Whether a number is a size, or of floating point and its root or the reciprocal of one of them."""
    if isinstance(number, int):
        return number == size
    return any(abs(number * base - 1) < NEAR or abs(number - base) < NEAR * base for base in (size, size**0.5))
