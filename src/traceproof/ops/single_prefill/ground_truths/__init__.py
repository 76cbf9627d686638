"""Ground truths of single_prefill, one file per source."""

from traceproof.ops.adapter import signature

PLAIN = signature("q k v [sm_scale] -> output")
ALL = signature("q k v [sm_scale] [logits_soft_cap] [window_left] [sinks] -> output")
