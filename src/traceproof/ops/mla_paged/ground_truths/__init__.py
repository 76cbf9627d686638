"""Ground truths of mla_paged, one file per source."""

from traceproof.ops.adapter import Definition, signature

SCALES = "[ckv_scale] [ckv_scale_arr] [kpe_scale]"
COMMON = f"q_nope q_pe ckv_cache kpe_cache kv_indptr kv_indices sm_scale [kv_last_page_len] [return_lse] {SCALES}"
DECODE = signature(f"{COMMON} -> output lse", rows="q_nope")
PREFILL = signature(f"{COMMON} qo_indptr -> output lse", rows="q_nope")
EITHER = signature(f"{COMMON} [qo_indptr] -> output lse", rows="q_nope")


def unscaled(definition: Definition) -> bool:
    """Whether the cache is stored as it is: scales are of one in fp8, and no adapter here takes them."""
    return not definition.inputs["ckv_cache"].dtype.startswith("float8") or "ckv_scale" not in definition.inputs
