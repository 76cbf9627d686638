"""Axes that several op_types have, and how a case tells its own."""

from collections.abc import Callable, Mapping
from typing import Any

from traceproof.ops.space import Axis, Chosen, Space

Json = Mapping[str, Any]
ROWS = Axis(
    "rows", ("one", "several", "none"), "a batch of one hides a wrong stride; an empty one a missing guard"
)
SCALE = Axis("values", ("plain", "adversarial"), "rounding and masks show in values that are not tame")


def const(definition: Json, name: str, default: int = 0) -> int:
    """A const axis of a definition in JSON."""
    return int(definition["axes"].get(name, {}).get("value", default))


def one(value: str) -> frozenset[str]:
    """A single value."""
    return frozenset({value})


def rows(count: int) -> frozenset[str]:
    """A number of rows as a value of ROWS."""
    return one("none" if count == 0 else "one" if count == 1 else "several")


def values_of(case: Json) -> frozenset[str]:
    """Whether a case is an adversarial one."""
    return one("adversarial" if case["size"] == "adversarial" else "plain")


def first_axis(definition: Json, case: Json) -> int:
    """Size of a definition's first var axis, the number of rows."""
    name = next(name for name, axis in definition["axes"].items() if axis["type"] == "var")
    return int(case["axes"][name])


def length_of(length: int) -> str:
    """A sequence's length as a value of its axis."""
    return "empty" if length == 0 else "one" if length == 1 else "short" if length < 64 else "long"


SEQUENCES = Axis("sequences", ("one", "several", "none"), "offsets of the second sequence; an empty batch")


def rows_only(definition: Json, case: Json) -> dict[str, frozenset[str]]:
    """ROWS and SCALE, for op_types whose first var axis is the rows."""
    return {"rows": rows(first_axis(definition, case)), "values": values_of(case)}


def tame(chosen: Chosen) -> bool:
    """Whether ROWS and SCALE can go together: no values without rows."""
    return not (chosen.get("rows") == "none" and chosen.get("values") == "adversarial")


def rows_and(axis: Axis, value: Callable[[Json], str]) -> Space:
    """ROWS, SCALE, and an axis whose value a definition sets for all its cases."""
    return Space(
        axes=(ROWS, SCALE, axis),
        read=lambda definition, case: rows_only(definition, case) | {axis.name: one(value(definition))},
        reachable=tame,
        fixed=frozenset({axis.name}),
    )


ROWS_AND_SCALE = Space(axes=(ROWS, SCALE), read=rows_only, reachable=tame)
