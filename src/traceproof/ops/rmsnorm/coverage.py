"""The axes of norms."""

from traceproof.ops.common.coverage import Json, rows_and
from traceproof.ops.space import Axis


def _residual(definition: Json) -> str:
    return "added" if "residual" in definition["inputs"] else "none"


SPACE = rows_and(Axis("residual", ("none", "added"), "the sum before the norm"), _residual)
