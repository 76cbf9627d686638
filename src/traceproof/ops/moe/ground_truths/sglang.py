"""SGLang's mixture of experts: its router and its experts, both Triton.

Groups of experts are chosen in native form: where the two best of a group are equal, the router (0.5.22, 0.5.23)
adds the third to the best in place of the second, and may keep another group.

It holds gate before up where definitions hold up before gate, so the halves are swapped. Weights that its
kernels can not read as stored (an fp8 scale an expert, fp4 values as float32) become bfloat16.
"""

from typing import Any

import torch

from traceproof.ops.adapter import SM89, Adapter, Api, Definition, Outputs, Values, scalar, signature, tensor
from traceproof.ops.common.quant import BLOCK
from traceproof.ops.moe.form import Form, Scaling, form_of
from traceproof.ops.moe.routing import PACKED_SHIFT, Method
from traceproof.stacks.sglang import publish

FOREIGN = -1  # the kernel leaves out an expert of this index


def _choice(api: Api, form: Form, inputs: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and global experts, [tokens, top_k]."""
    hidden, routing = tensor(inputs, "hidden_states"), form.routing
    if routing.given:
        return _read(form, tensor(inputs, "topk_ids"))
    logits = tensor(inputs, "routing_logits").float().contiguous()
    if routing.method is Method.DEEPSEEK:
        bias = tensor(inputs, "routing_bias").float()
        if routing.groups > 1:
            weights, experts = api["grouped_topk"](
                hidden,
                logits,
                bias,
                topk=routing.top_k,
                renormalize=True,
                num_expert_group=routing.groups,
                topk_group=routing.top_groups,
            )[:2]
        else:
            weights, experts = api["router"](logits, bias, routing.top_k, scoring_func="sigmoid")
        return weights * scalar(inputs, "routed_scaling_factor"), experts
    if routing.method is Method.LLAMA4:
        none = logits.new_zeros(logits.shape[1])
        weights, experts = api["router"](logits, none, routing.top_k, scoring_func="sigmoid", renormalize=False)
        return weights, experts
    weights, experts = api["router"](logits, None, routing.top_k, scoring_func="softmax")
    return weights, experts


def _read(form: Form, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if form.routing.method is Method.UNIFORM:
        return torch.full(topk_ids.shape, 1 / form.routing.top_k, device=topk_ids.device), topk_ids
    weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
    return weights, topk_ids >> PACKED_SHIFT


def _swapped(weights: torch.Tensor) -> torch.Tensor:
    """Up before gate to gate before up, along the rows of every expert."""
    up, gate = weights.chunk(2, dim=1)
    return torch.cat([gate, up], dim=1)


def _fp8(inputs: Values) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """As stored; activations are handed over quantised, so that they are not rounded twice."""
    hidden, scales = tensor(inputs, "hidden_states"), tensor(inputs, "hidden_states_scale").t().contiguous()
    wide = (hidden.float() * scales.repeat_interleave(BLOCK, dim=1)).to(torch.bfloat16)
    options = {
        "use_fp8_w8a8": True,
        "block_shape": [BLOCK, BLOCK],
        "w1_scale": _swapped(tensor(inputs, "gemm1_weights_scale")),
        "w2_scale": tensor(inputs, "gemm2_weights_scale"),
        "a1_q": hidden,
        "a1_scale": scales,
    }
    first = _swapped(tensor(inputs, "gemm1_weights").view(torch.uint8)).view(torch.float8_e4m3fn)
    return wide, first, tensor(inputs, "gemm2_weights"), options


def _wide(form: Form, inputs: Values) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Everything in bfloat16, scales multiplied in."""
    hidden = tensor(inputs, "hidden_states").to(torch.bfloat16)
    first, second = tensor(inputs, "gemm1_weights"), tensor(inputs, "gemm2_weights")
    if form.scaling is Scaling.FP8_TENSOR:
        up, gate, down = (
            tensor(inputs, name).view(-1, 1, 1)
            for name in ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
        )
        half = first.shape[1] // 2
        first = torch.cat(
            [(first[:, :half].float() * up).bfloat16(), (first[:, half:].float() * gate).bfloat16()], dim=1
        )
        second = (second.float() * down).bfloat16()
    return hidden, _swapped(first.to(torch.bfloat16)), second.to(torch.bfloat16), {}


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    publish()
    form = form_of(definition)
    weights, experts = _choice(api, form, inputs)
    offset = int(scalar(inputs, "local_expert_offset")) if form.has_offset else 0
    local = experts.to(torch.int32) - offset
    here = (local >= 0) & (local < form.local)
    hidden, first, second, options = _fp8(inputs) if form.scaling is Scaling.FP8_BLOCK else _wide(form, inputs)
    output = api["experts"](
        hidden,
        first,
        second,
        weights.float().contiguous(),
        torch.where(here, local, FOREIGN).contiguous(),
        apply_router_weight_on_input=form.weight_on_input,
        **options,
    )
    return {"output": output}


SERVED = signature(
    "hidden_states gemm1_weights gemm2_weights"
    " [routing_logits] [routing_bias] [topk_ids] [local_expert_offset] [routed_scaling_factor]"
    " [hidden_states_scale] [gemm1_weights_scale] [gemm2_weights_scale]"
    " [output1_scales_scalar] [output1_scales_gate_scalar] [output2_scales_scalar] -> output",
    rows="hidden_states",
)

ADAPTERS = (Adapter("fused_experts_impl", SERVED, _call, ("experts", "router", "grouped_topk"), sm=SM89),)
