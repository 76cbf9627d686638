"""PyTorch's softmax and its k largest, in float32."""

from dataclasses import replace

import torch

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.moe_routing.ground_truths import ROUTER

SOFTMAX, LARGEST = "torch:softmax", "torch:topk"


def _route(api: Api, definition: Definition, inputs: Values) -> Outputs:
    ids = definition.outputs["topk_ids"]
    count = definition.const_axes[(ids.shape or ("", ""))[1]]
    weights, experts = api[LARGEST](api[SOFTMAX](tensor(inputs, "router_logits").float(), -1), count, -1)
    if definition.constants.number("renormalize"):
        weights = weights / weights.sum(-1, keepdim=True)
    return {"topk_weights": weights.to(torch.float32), "topk_ids": experts.to(TORCH_DTYPES[ids.dtype])}


ADAPTERS = (Adapter("softmax", replace(ROUTER, rows=None), apis=(SOFTMAX, LARGEST), call=_route),)
