"""What a worker's zygote imports before it forks, so that a definition does not pay for it again."""

import contextlib

from traceproof.actors import execute, measure
from traceproof.draw.tables import upper_quantiles
from traceproof.ops.registry import get, known

__all__ = ["execute", "measure"]

upper_quantiles()
for op_type in known():
    # One that does not import fails where it is used, and costs its own definitions.
    with contextlib.suppress(Exception):
        get(op_type)
