"""The axes of samplers."""

from traceproof.ops.common.coverage import Json, rows_and
from traceproof.ops.space import Axis


def _filter(definition: Json) -> str:
    return " and ".join(name for name in ("top_k", "top_p") if name in definition["inputs"]) or "none"


SPACE = rows_and(Axis("filter", ("top_k", "top_p", "top_k and top_p"), "which tokens remain"), _filter)
