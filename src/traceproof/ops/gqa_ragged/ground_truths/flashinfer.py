"""Causal prefill over ragged keys and values."""

from traceproof.ops.common.ground_truths.ragged.flashinfer import ADAPTERS

__all__ = ["ADAPTERS"]
