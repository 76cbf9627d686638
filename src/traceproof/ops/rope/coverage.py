"""The axes of rotary embeddings."""

from traceproof.ops.common.coverage import Json, const, rows_and
from traceproof.ops.space import Axis


def _rotary(definition: Json) -> str:
    return "part" if const(definition, "rotary_dim") < const(definition, "head_size") else "whole"


SPACE = rows_and(Axis("rotary", ("part", "whole"), "what is left unrotated"), _rotary)
