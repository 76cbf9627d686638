"""The experts in float64: only those chosen, a slice of weight rows at a time."""

from __future__ import annotations

import torch

from traceproof.ops.base import Values
from traceproof.ops.common.quant import BLOCK, scale_blocks
from traceproof.ops.moe.form import Form, Scaling
from traceproof.ops.moe.routing import Choice, choose, read

SLICE = 1 << 22  # weight elements widened at a time: 32 MiB in float64, and a multiple of any block row


def tensor(inputs: Values, name: str) -> torch.Tensor:
    """An input that is a tensor."""
    value = inputs[name]
    assert isinstance(value, torch.Tensor), name
    return value


def chosen(form: Form, inputs: Values) -> Choice:
    """Where every token goes."""
    if form.routing.given:
        return read(form.routing, tensor(inputs, "topk_ids"))
    bias = tensor(inputs, "routing_bias") if form.has_bias else None
    factor = inputs.get("routed_scaling_factor", 1.0)
    assert isinstance(factor, int | float)
    return choose(form.routing, tensor(inputs, "routing_logits"), bias, float(factor))


def mixture(form: Form, inputs: Values) -> torch.Tensor:
    """The output: float64 [tokens, hidden]."""
    choice = chosen(form, inputs)
    hidden = _hidden(form, inputs)
    local = choice.experts - _offset(inputs)
    output = torch.zeros_like(hidden)
    here = local[(local >= 0) & (local < form.local)]
    for expert in torch.unique(here).tolist():
        tokens, slots = torch.nonzero(local == expert, as_tuple=True)
        weights = choice.weights[tokens, slots][:, None]
        x = hidden[tokens]
        y = _expert(form, inputs, expert, x * weights if form.weight_on_input else x)
        output.index_add_(0, tokens, y if form.weight_on_input else y * weights)
    return output


def _offset(inputs: Values) -> int:
    offset = inputs.get("local_expert_offset", 0)
    assert isinstance(offset, int)
    return offset


def _hidden(form: Form, inputs: Values) -> torch.Tensor:
    hidden = tensor(inputs, "hidden_states").to(torch.float64)
    if form.scaling != Scaling.FP8_BLOCK:
        return hidden
    return scale_blocks(hidden, tensor(inputs, "hidden_states_scale").t(), height=1)


def _expert(form: Form, inputs: Values, expert: int, x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, then down, of the rows x: float64 [rows, hidden]."""
    both = _product(inputs, "gemm1_weights", expert, x)
    up, gate = both[:, : form.intermediate], both[:, form.intermediate :]
    if form.scaling == Scaling.FP8_TENSOR:
        up = up * tensor(inputs, "output1_scales_scalar")[expert].to(torch.float64)
        gate = gate * tensor(inputs, "output1_scales_gate_scalar")[expert].to(torch.float64)
    y = _product(inputs, "gemm2_weights", expert, torch.nn.functional.silu(gate) * up)
    if form.scaling == Scaling.FP8_TENSOR:
        y = y * tensor(inputs, "output2_scales_scalar")[expert].to(torch.float64)
    return y


def _product(inputs: Values, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    """X times the transpose of one expert's weights with their block scales, if there are any."""
    weights = tensor(inputs, name)[expert]
    scales = tensor(inputs, name + "_scale")[expert] if name + "_scale" in inputs else None
    rows = max(SLICE // weights.shape[1] // BLOCK, 1) * BLOCK
    parts = []
    for start in range(0, weights.shape[0], rows):
        part = weights[start : start + rows].to(torch.float64)
        if scales is not None:
            part = scale_blocks(part, scales[start // BLOCK : (start + rows) // BLOCK], height=BLOCK)
        parts.append(x @ part.t())
    return torch.cat(parts, -1)
