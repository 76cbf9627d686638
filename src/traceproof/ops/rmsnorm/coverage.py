"""The axes of norms."""

from __future__ import annotations

from traceproof.ops.common.coverage import ROWS, SCALE, Json, one, rows_only, tame
from traceproof.ops.space import Axis, Space, Values


def _norm(definition: Json, case: Json) -> Values:
    return rows_only(definition, case) | {
        "residual": one("added" if "residual" in definition["inputs"] else "none")
    }


SPACE = Space(
    axes=(
        ROWS,
        SCALE,
        Axis("residual", ("none", "added"), "the sum before the norm"),
    ),
    read=_norm,
    reachable=tame,
    fixed=frozenset({"residual"}),
)
