"""Causal prefill over ragged keys and values, for grouped-query and multi-head latent attention alike."""
