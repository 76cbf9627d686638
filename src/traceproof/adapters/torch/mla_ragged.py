"""Multi-head latent attention's prefill: the same, values narrower than keys."""

from __future__ import annotations

from traceproof.adapters.torch import gqa_ragged

ADAPTERS = gqa_ragged.ADAPTERS
