"""The axes that cases of an op_type differ in, by which coverage is told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from traceproof.ops import registry

Values = Mapping[str, frozenset[str]]  # axis -> values that one case exercises; a case may have several of an axis
Chosen = Mapping[str, str]  # axis -> one value


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that matters, with its values from the smallest case's on, and why it matters."""

    name: str
    values: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The axes of one op_type."""

    axes: tuple[Axis, ...]
    # (definition, case) as JSON -> values of each axis
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], Values]
    # whether values of two or more axes can go together; what is missing in its argument is open
    reachable: Callable[[Chosen], bool] = field(default=lambda _: True)
    fixed: frozenset[str] = frozenset()  # axes that each definition sets for all its cases
    op_type: str = ""  # filled in by `space_of`

    def axis(self, name: str) -> Axis:
        """An axis by its name."""
        return next(axis for axis in self.axes if axis.name == name)


@cache
def space_of(op_type: str) -> Space | None:
    """The axes of an op_type, rows and values where its folder has no coverage.py; None: it has no folder."""
    if op_type not in registry.known():
        return None
    from traceproof.ops.common.coverage import ROWS_AND_SCALE

    found: Space = registry.attribute(op_type, "coverage", "SPACE") or ROWS_AND_SCALE
    return replace(found, op_type=op_type)
