"""PyTorch's scaled dot product attention."""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, scalar, tensor
from traceproof.ops.single_prefill.ground_truths import ALL, PLAIN

SOFTMAX = "torch:softmax"
NAME = "torch.nn.functional:scaled_dot_product_attention"


def _attend(api: Api, definition: Definition, inputs: Values) -> Outputs:
    q, k, v = (tensor(inputs, name) for name in "qkv")
    causal = bool(definition.constants.number("causal"))
    place = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    mask = torch.arange(len(k), device=q.device)[None] <= place if causal else None
    heads = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
    scale = inputs.get("sm_scale")
    found = api[NAME](*heads, scale=None if scale is None else float(scale), enable_gqa=True, attn_mask=mask)
    return {"output": found.squeeze(0).transpose(0, 1)}


def _softmax(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """With a window, a soft cap or sinks: logits and one softmax over them and the sinks."""
    q, k, v = (tensor(inputs, name).float() for name in "qkv")
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scale = inputs.get("sm_scale")
    logits = torch.einsum("nhd,lhd->hnl", q, k) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    if inputs.get("logits_soft_cap") is not None:
        cap = scalar(inputs, "logits_soft_cap")
        logits = cap * torch.tanh(logits / cap)
    place = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    key = torch.arange(len(k), device=q.device)[None]
    hidden = key > place if definition.constants.number("causal") else key < 0
    if inputs.get("window_left") is not None:
        hidden = hidden | (key < place - int(scalar(inputs, "window_left")))
    logits = logits.masked_fill(hidden, float("-inf"))
    if inputs.get("sinks") is not None:
        sinks = tensor(inputs, "sinks")[:, None, None].expand(-1, len(q), 1)
        logits = torch.cat([logits, sinks], -1)
    weights = api[SOFTMAX](logits, -1)[..., : len(k)]
    return {"output": torch.einsum("hnl,lhd->nhd", weights, v).to(tensor(inputs, "q").dtype)}


ADAPTERS = (
    Adapter("functional.scaled_dot_product_attention", PLAIN, apis=(NAME,), call=_attend),
    Adapter("softmax", ALL, apis=(SOFTMAX,), call=_softmax),
)
