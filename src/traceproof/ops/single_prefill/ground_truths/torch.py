"""PyTorch's scaled dot product attention."""

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, tensor
from traceproof.ops.base import Values
from traceproof.ops.common.constants import named_constants
from traceproof.ops.single_prefill.ground_truths import PLAIN

NAME = "torch.nn.functional:scaled_dot_product_attention"


def _attend(api: Api, definition: Definition, inputs: Values) -> Outputs:
    q, k, v = (tensor(inputs, name) for name in "qkv")
    causal = bool(named_constants(definition).get("causal", 0))
    place = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    mask = torch.arange(len(k), device=q.device)[None] <= place if causal else None
    heads = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
    scale = inputs.get("sm_scale")
    found = api[NAME](*heads, scale=None if scale is None else float(scale), enable_gqa=True, attn_mask=mask)
    return {"output": found.squeeze(0).transpose(0, 1)}


ADAPTERS = (Adapter("functional.scaled_dot_product_attention", PLAIN, apis=(NAME,), call=_attend),)
