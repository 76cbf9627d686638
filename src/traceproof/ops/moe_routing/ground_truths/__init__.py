"""Ground truths of moe_routing, one file per source."""

from traceproof.ops.adapter import signature

ROUTER = signature("router_logits -> topk_weights topk_ids", rows="router_logits")
