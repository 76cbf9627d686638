"""Causal prefill over ragged keys and values, for grouped-query and multi-head latent attention alike."""

from traceproof.ops.adapter import signature

RAGGED = signature("q k v qo_indptr kv_indptr sm_scale [return_lse] -> output lse", rows="q")
