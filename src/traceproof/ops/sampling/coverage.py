"""The axes of samplers."""

from __future__ import annotations

from traceproof.ops.common.coverage import ROWS, SCALE, Json, one, rows_only, tame
from traceproof.ops.space import Axis, Space, Values


def _sampling(definition: Json, case: Json) -> Values:
    names = [name for name in ("top_k", "top_p") if name in definition["inputs"]]
    return rows_only(definition, case) | {"filter": one(" and ".join(names) or "none")}


SPACE = Space(
    axes=(
        ROWS,
        SCALE,
        Axis("filter", ("top_k", "top_p", "top_k and top_p"), "which tokens remain"),
    ),
    read=_sampling,
    reachable=tame,
    fixed=frozenset({"filter"}),
)
