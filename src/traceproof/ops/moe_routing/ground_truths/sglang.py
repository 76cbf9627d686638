"""SGLang's compiled router."""

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.moe_routing.ground_truths import ROUTER

NAME = "sgl_kernel:topk_softmax"


def _route(api: Api, definition: Definition, inputs: Values) -> Outputs:
    logits = tensor(inputs, "router_logits")
    count = definition.const_axes[(definition.outputs["topk_ids"].shape or ("", ""))[1]]
    weights = torch.empty((len(logits), count), dtype=torch.float32, device=logits.device)
    experts = torch.empty((len(logits), count), dtype=torch.int32, device=logits.device)
    api[NAME](weights, experts, logits, bool(definition.constants.number("renormalize")))
    return {"topk_weights": weights, "topk_ids": experts}


def _accepts(definition: Definition) -> bool:
    outputs = definition.outputs
    return outputs["topk_ids"].dtype == "int32" and outputs["topk_weights"].dtype == "float32"


ADAPTERS = (Adapter("topk_softmax", ROUTER, _route, (NAME,), accepts=_accepts, packages=("sgl_kernel",), sm=SM80),)
