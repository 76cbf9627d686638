"""Multi-head latent attention's prefill over ragged keys: the same kernel, values narrower than keys."""

from __future__ import annotations

from traceproof.adapters.sglang import gqa_ragged

ADAPTERS = gqa_ragged.ADAPTERS
