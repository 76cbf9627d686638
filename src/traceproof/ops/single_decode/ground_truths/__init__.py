"""Ground truths of single_decode, one file per source."""

from traceproof.ops.adapter import signature

PLAIN = signature("q k v [sm_scale] -> output")
