"""Ground truths of dsa_paged, one file per source."""

from traceproof.ops.adapter import signature

SPARSE = signature("q_nope q_pe ckv_cache kpe_cache sparse_indices sm_scale -> output lse", rows="q_nope")
