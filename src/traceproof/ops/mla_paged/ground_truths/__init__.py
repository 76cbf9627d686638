"""Ground truths of mla_paged, one file per source."""

from traceproof.ops.adapter import signature

COMMON = "q_nope q_pe ckv_cache kpe_cache kv_indptr kv_indices sm_scale [kv_last_page_len]"
DECODE = signature(f"{COMMON} -> output lse", rows="q_nope")
PREFILL = signature(f"{COMMON} qo_indptr -> output lse", rows="q_nope")
EITHER = signature(f"{COMMON} [qo_indptr] -> output lse", rows="q_nope")
