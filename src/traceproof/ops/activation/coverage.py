"""The axes of activations."""

from traceproof.ops.common.coverage import ROWS, SCALE, rows_only, tame
from traceproof.ops.space import Space

SPACE = Space(axes=(ROWS, SCALE), read=rows_only, reachable=tame)
