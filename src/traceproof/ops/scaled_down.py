"""A scaled-down definition: the same reference with smaller const axes, judged where the definition does not fit.

An axis whose size the reference's text states keeps that size. Where no axis is left, whole numbers of the text
that are sizes change with their axes: a pass then counts like any other. A failure does, too, if these numbers
stand in asserts alone; else it says nothing.
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

    sizes, changes, computes = smaller(stated), dict[int, int](), False
    if not sizes:
        sizes = smaller(())
        computes = smaller(dict(_stated(definition, computed=True))) != sizes
        if computes:  # a small number may be anything; a large one is the size of its axis
            sizes = smaller(
                [name for name in stated if old[name] < SCALED_DOWN_LEAST or name not in _whole(definition)]
            )
        changes = {old[name]: new for name, (_, new) in sizes.items() if name in stated}
        if any(size in changes and changes[size] != sizes.get(name, (0, size))[1] for name, size in old.items()):
            sizes = {}  # two axes of one size would get different ones
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


def _stated(definition: Definition, *, computed: bool = False) -> Iterator[tuple[str, int]]:
    """Const axes of more than one element that a number of the reference follows from, with its first line.

    `computed`: a number that stands in no assert.
    """
    said = numbers(definition, computed=computed)
    for name, size in definition.const_axes.items():
        lines = [line for value, line in said if size > 1 and _follows(value, size)]
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
