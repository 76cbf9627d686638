"""Ground truths of cascade_merge, one file per source."""

from traceproof.ops.adapter import signature

PAIR = signature("v_a s_a v_b s_b -> v_merged s_merged", rows="v_a")
MANY = signature("v s -> v_merged s_merged", rows="v")
IN_PLACE = signature("v s v_other s_other [mask] -> v_out s_out", rows="v")
