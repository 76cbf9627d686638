"""Causal prefill over ragged keys and values."""

from traceproof.ops.common.ground_truths.ragged.sglang import ADAPTERS

__all__ = ["ADAPTERS"]
