"""Ground truths of gdn, one file per source."""

from traceproof.ops.adapter import signature

GATES = "q k v A_log a dt_bias b scale"
DECODE = signature(f"{GATES} state -> output new_state", rows="q")
MTP = signature(
    f"{GATES} initial_state initial_state_indices [intermediate_states_buffer] -> output final_state", rows="q"
)
PREFILL = signature(f"{GATES} state cu_seqlens -> output new_state")
