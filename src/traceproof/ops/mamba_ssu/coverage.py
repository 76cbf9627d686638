"""The axes of the selective state update."""

from traceproof.ops.common.coverage import Json, const, rows_and
from traceproof.ops.space import Axis


def _groups(definition: Json) -> str:
    return "one" if const(definition, "ngroups") == 1 else "several"


SPACE = rows_and(Axis("groups", ("one", "several"), "which group a head reads"), _groups)
