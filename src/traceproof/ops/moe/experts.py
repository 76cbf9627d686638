"""The experts in float64: only those chosen, a slice of weight rows at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from traceproof.ops.base import Values, tensor
from traceproof.ops.common.quant import BLOCK, scale_blocks
from traceproof.ops.moe.form import Form, Scaling
from traceproof.ops.moe.routing import Choice, choose, read

SLICE = 1 << 22  # weight elements widened at a time: 32 MiB in float64, and a multiple of any block row


def chosen(form: Form, inputs: Values) -> Choice:
    """Where every token goes."""
    if form.routing.given:
        return read(form.routing, tensor(inputs, "topk_ids"))
    bias = tensor(inputs, "routing_bias") if form.has_bias else None
    factor = inputs.get("routed_scaling_factor", 1.0)
    assert isinstance(factor, int | float)
    return choose(form.routing, tensor(inputs, "routing_logits"), bias, float(factor))


@dataclass(frozen=True, slots=True)
class Share:
    """One expert's part: `active` [rows, intermediate] of the rows `tokens` goes into gemm2, times `weights`."""

    expert: int
    tokens: torch.Tensor
    active: torch.Tensor
    weights: torch.Tensor


def shares(form: Form, inputs: Values) -> Iterator[Share]:
    """What every local expert that is chosen has to do."""
    choice = chosen(form, inputs)
    hidden = _hidden(form, inputs)
    local = choice.experts - _offset(inputs)
    here = local[(local >= 0) & (local < form.local)]
    for expert in torch.unique(here).tolist():
        tokens, slots = torch.nonzero(local == expert, as_tuple=True)
        weights = choice.weights[tokens, slots][:, None]
        x = hidden[tokens] * weights if form.weight_on_input else hidden[tokens]
        outer = torch.ones_like(weights) if form.weight_on_input else weights
        if form.scaling == Scaling.FP8_TENSOR:
            outer = outer * tensor(inputs, "output2_scales_scalar")[expert].to(torch.float64)
        yield Share(expert, tokens, _active(form, inputs, expert, x), outer)


def mixture_of(form: Form, inputs: Values, work: Sequence[Share]) -> torch.Tensor:
    """The output, from what the experts have to do."""
    hidden = tensor(inputs, "hidden_states")
    output = torch.zeros((len(hidden), form.hidden), dtype=torch.float64, device=hidden.device)
    for share in work:
        y = torch.cat([share.active @ part.t() for part in _slices(inputs, "gemm2_weights", share.expert)], -1)
        output.index_add_(0, share.tokens, y * share.weights)
    return output


def roundings(inputs: Values, work: Sequence[Share], output: torch.Tensor) -> torch.Tensor:
    """How many equal roundings of `active` the output's slope averages over: float64 [1].

    Rounding element i of a row's `active` moves the output by a vector d_i. An error sum(r_i d_i), the r_i
    independent, has a part along the output whose deviation, against the size of the whole error, is
    sqrt(sum (d_i . output)^2 / (|output|^2 sum |d_i|^2)). Were it n equal orthogonal vectors that add up to the
    output, this would be 1 / sqrt(n): n is what this gives. It is far below the number of elements, since
    silu(gate) * up has heavy tails.
    """
    along = across = 0.0
    for share in work:
        step = share.active * share.weights
        pulled, norms, start = torch.zeros_like(step), torch.zeros_like(step[:1]), 0
        for part in _slices(inputs, "gemm2_weights", share.expert):
            pulled += output[share.tokens, start : start + len(part)] @ part
            norms += (part * part).sum(0, keepdim=True)
            start += len(part)
        along += float(((step * pulled) ** 2).sum())
        across += float((step * step * norms).sum())
    energy = float((output * output).sum())
    return torch.tensor([energy * across / along if along else 1.0], dtype=torch.float64, device=output.device)


def _offset(inputs: Values) -> int:
    offset = inputs.get("local_expert_offset", 0)
    assert isinstance(offset, int)
    return offset


def _hidden(form: Form, inputs: Values) -> torch.Tensor:
    hidden = tensor(inputs, "hidden_states").to(torch.float64)
    if form.scaling != Scaling.FP8_BLOCK:
        return hidden
    return scale_blocks(hidden, tensor(inputs, "hidden_states_scale").t(), height=1)


def _active(form: Form, inputs: Values, expert: int, x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of the rows x: float64 [rows, intermediate]."""
    both = torch.cat([x @ part.t() for part in _slices(inputs, "gemm1_weights", expert)], -1)
    up, gate = both[:, : form.intermediate], both[:, form.intermediate :]
    if form.scaling == Scaling.FP8_TENSOR:
        up = up * tensor(inputs, "output1_scales_scalar")[expert].to(torch.float64)
        gate = gate * tensor(inputs, "output1_scales_gate_scalar")[expert].to(torch.float64)
    return torch.nn.functional.silu(gate) * up


def _slices(inputs: Values, name: str, expert: int) -> Iterator[torch.Tensor]:
    """Rows of one expert's weights in float64 with their block scales, if there are any, a slice at a time."""
    weights = tensor(inputs, name)[expert]
    scales = tensor(inputs, name + "_scale")[expert] if name + "_scale" in inputs else None
    rows = max(SLICE // weights.shape[1] // BLOCK, 1) * BLOCK
    for start in range(0, weights.shape[0], rows):
        part = weights[start : start + rows].to(torch.float64)
        if scales is not None:
            part = scale_blocks(part, scales[start // BLOCK : (start + rows) // BLOCK], height=BLOCK)
        yield part
