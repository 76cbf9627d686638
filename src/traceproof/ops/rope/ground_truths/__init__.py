"""Ground truths of rope, one file per source."""

from traceproof.ops.adapter import signature

ROTARY = signature("q k cos_sin_cache positions -> q_out k_out", rows="q")
