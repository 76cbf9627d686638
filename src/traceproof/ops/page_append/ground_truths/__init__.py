"""Ground truths of page_append, one file per source."""

from traceproof.ops.adapter import signature

APPEND = signature(
    "append_key append_value batch_indices positions k_cache v_cache kv_indices kv_indptr [kv_last_page_len]"
    " -> k_cache_out v_cache_out",
    rows=None,
)
