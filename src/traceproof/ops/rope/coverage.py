"""The axes of rotary embeddings."""

from __future__ import annotations

from traceproof.ops.common.coverage import ROWS, SCALE, Json, const, one, rows_only, tame
from traceproof.ops.space import Axis, Space, Values


def _rope(definition: Json, case: Json) -> Values:
    part = const(definition, "rotary_dim") < const(definition, "head_size")
    return rows_only(definition, case) | {"rotary": one("part" if part else "whole")}


SPACE = Space(
    axes=(
        ROWS,
        SCALE,
        Axis("rotary", ("part", "whole"), "what is left unrotated"),
    ),
    read=_rope,
    reachable=tame,
    fixed=frozenset({"rotary"}),
)
