"""Causal prefill over ragged keys and values, the values narrower than the keys."""

from traceproof.ops.common.ground_truths.ragged.flashinfer import ADAPTERS

__all__ = ["ADAPTERS"]
