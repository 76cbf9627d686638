"""Ground truths of layernorm, one file per source."""

from traceproof.ops.adapter import signature

NORM = signature("hidden_states weight bias -> output", rows="hidden_states")
