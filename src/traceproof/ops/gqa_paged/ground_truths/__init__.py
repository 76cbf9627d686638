"""Ground truths of gqa_paged, one file per source."""

from traceproof.ops.adapter import signature

COMMON = "q k_cache v_cache kv_indptr kv_indices sm_scale [kv_last_page_len] [return_lse]"  # all return it
DECODE = signature(f"{COMMON} -> output lse", rows="q")
PREFILL = signature(f"{COMMON} qo_indptr -> output lse", rows="q")
EITHER = signature(f"{COMMON} [qo_indptr] -> output lse", rows="q")
