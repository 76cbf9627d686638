"""Multi-head latent attention's prefill over ragged keys: the same wrapper, values narrower than keys."""

from __future__ import annotations

from traceproof.adapters.flashinfer import gqa_ragged

ADAPTERS = gqa_ragged.ADAPTERS
