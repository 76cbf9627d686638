"""What a worker's zygote imports before it forks, so that a definition does not pay for it again."""

from __future__ import annotations

from traceproof.actors import execute
from traceproof.draw.tables import upper_quantiles

__all__ = ["execute"]

upper_quantiles()
