"""Causal prefill over ragged keys and values, the values narrower than the keys."""

from traceproof.ops.common.ground_truths.ragged.sglang import ADAPTERS

__all__ = ["ADAPTERS"]
