"""Ground truths of rmsnorm_sigmoid_gate, one file per source."""

from traceproof.ops.adapter import signature

GATED = signature("input gate eps -> output", rows="input")
