"""The axes of the selective state update."""

from __future__ import annotations

from traceproof.ops.common.coverage import ROWS, SCALE, Json, const, one, rows_only, tame
from traceproof.ops.space import Axis, Space, Values


def _mamba(definition: Json, case: Json) -> Values:
    return rows_only(definition, case) | {"groups": one("one" if const(definition, "ngroups") == 1 else "several")}


SPACE = Space(
    axes=(
        ROWS,
        SCALE,
        Axis("groups", ("one", "several"), "which group a head reads"),
    ),
    read=_mamba,
    reachable=tame,
    fixed=frozenset({"groups"}),
)
