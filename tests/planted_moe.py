"""MoE as kernels compute it, with their roundings, and with planted mistakes. For the tests of the gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from planted_fp4 import requantise_fp4

from traceproof.ops.base import Values, tensor
from traceproof.ops.common.quant import BLOCK, requantise_fp8, to_fp8
from traceproof.ops.moe.form import Form, Scaling
from traceproof.ops.moe.routing import Choice, Method, choose, read

Rounding = Callable[[torch.Tensor], torch.Tensor]


def _keep(values: torch.Tensor) -> torch.Tensor:
    return values


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).to(values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Where a kernel rounds: the token, gemm1's result, the activated product, an expert's result, the weight."""

    token: Rounding = _keep
    first: Rounding = _keep
    active: Rounding = _keep
    result: Rounding = _keep
    weight: Rounding = _keep


# FlashInfer on SM100 stores gemm1's result in fp8 by 1 x 128 blocks, activates, and stores that in fp8 again;
# SGLang's Triton kernels keep gemm1's result in bfloat16. Both store an expert's result in bfloat16.
KERNELS: dict[Scaling, dict[str, Kernel]] = {
    Scaling.FP8_BLOCK: {
        "flashinfer": Kernel(first=requantise_fp8, active=requantise_fp8, result=_bf16, weight=_bf16),
        "sglang": Kernel(first=_bf16, active=lambda c: requantise_fp8(_bf16(c)), result=_bf16),
    },
    Scaling.FP8_TENSOR: {"flashinfer": Kernel(active=to_fp8, result=_bf16, weight=_bf16)},
    Scaling.FP4: {
        "nvfp4": Kernel(token=requantise_fp4, active=requantise_fp4, result=_bf16, weight=_bf16),
        "mxfp8": Kernel(
            token=partial(requantise_fp8, block=32),
            active=partial(requantise_fp8, block=32),
            result=_bf16,
            weight=_bf16,
        ),
        "bf16": Kernel(active=_bf16, result=_bf16, weight=_bf16),
    },
    Scaling.PLAIN: {"bf16": Kernel(first=_bf16, active=_bf16, result=_bf16, weight=_bf16)},
}

# Activations in fp4 cost a fifth of a row's RMS. FlashInfer takes bfloat16 ones beside mxfp4 weights, too.
TOO_COARSE = frozenset({"nvfp4"})

MISTAKES = (
    "zeros",
    "sign",
    "slope",
    "swapped",
    "no-normalisation",
    "no-factor",
    "no-bias",
    "bias-in-weights",
    "no-groups",
    "one-group-fewer",
    "group-best-one",
    "one-expert-fewer",
    "last-expert-dropped",
    "softmax-all",
    "weight-on-output",
    "no-sigmoid",
    "uniform-weights",
    "no-offset",
    "scale-transposed",
    "scale-shifted",
    "no-hidden-scale",
    "gate-scale-on-up",
    "next-expert",
    "token-shifted",
)


def applies(mistake: str, form: Form) -> bool:
    """Whether the mistake can be made with this form."""
    method, scaling = form.routing.method, form.scaling
    deepseek, block, tensor_wise = method == Method.DEEPSEEK, scaling == Scaling.FP8_BLOCK, form.weight_on_input
    conditions = {
        "no-normalisation": deepseek or method == Method.RENORMALISE,
        "no-factor": deepseek,
        "no-bias": deepseek,
        "bias-in-weights": deepseek,
        "no-groups": deepseek,
        "one-group-fewer": deepseek,
        "group-best-one": deepseek,
        "one-expert-fewer": form.routing.top_k > 1 and not form.routing.given,
        "last-expert-dropped": form.routing.top_k > 1,
        "softmax-all": method == Method.RENORMALISE,
        "weight-on-output": tensor_wise,
        "no-sigmoid": tensor_wise,
        "uniform-weights": form.routing.top_k > 1,
        "no-offset": form.has_offset,
        "scale-transposed": block and form.hidden // BLOCK == 2 * form.intermediate // BLOCK,
        "scale-shifted": block,
        "no-hidden-scale": block,
        "gate-scale-on-up": tensor_wise,
    }
    return conditions.get(mistake, True)


def _wrong_routing(form: Form, mistake: str) -> Form:
    routing = form.routing
    if mistake == "no-groups":
        routing = replace(routing, groups=1, top_groups=1)
    if mistake == "one-group-fewer":
        routing = replace(routing, top_groups=routing.top_groups - 1)
    if mistake == "one-expert-fewer":
        routing = replace(routing, top_k=routing.top_k - 1)
    return replace(form, routing=routing)


def _without_weak_groups(form: Form, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Logits with the groups pushed away that lose if a group counts only its best expert."""
    groups = (len(logits), form.routing.groups, form.experts // form.routing.groups)
    scores = (torch.sigmoid(logits) + bias.to(torch.float64)).view(groups)
    kept = scores.amax(-1).topk(form.routing.top_groups).indices
    lost = torch.ones_like(scores[..., 0], dtype=torch.bool).scatter(-1, kept, value=False)
    return logits.view(groups).masked_fill(lost[..., None], -50.0).view(logits.shape)


def _choice(form: Form, inputs: Values, mistake: str) -> Choice:
    form = _wrong_routing(form, mistake)
    if form.routing.given:
        choice = read(form.routing, tensor(inputs, "topk_ids"))
    else:
        logits = tensor(inputs, "routing_logits").to(torch.float64)
        bias = tensor(inputs, "routing_bias") if form.has_bias else None
        factor = inputs.get("routed_scaling_factor", 1.0)
        assert isinstance(factor, float)
        if mistake == "group-best-one":
            assert bias is not None
            logits = _without_weak_groups(form, logits, bias)
        choice = choose(form.routing, logits, None if mistake == "no-bias" else bias, factor)
        chosen = logits.gather(-1, choice.experts)
        weights = choice.weights
        match mistake:
            case "no-normalisation" if form.routing.method == Method.DEEPSEEK:
                weights = torch.sigmoid(chosen) * factor
            case "no-normalisation" | "softmax-all":
                weights = torch.softmax(logits, -1).gather(-1, choice.experts)
            case "no-factor":
                weights = weights / factor
            case "bias-in-weights":
                assert bias is not None
                plain = torch.sigmoid(chosen) + bias.to(torch.float64)[choice.experts]
                weights = plain / plain.sum(-1, keepdim=True) * factor
            case "no-sigmoid":
                weights = torch.ones_like(weights)
        choice = Choice(choice.experts, weights)
    if mistake == "last-expert-dropped":
        choice = Choice(choice.experts[:, :-1], choice.weights[:, :-1])
    if mistake == "uniform-weights":
        mean = choice.weights.mean(-1, keepdim=True)
        choice = Choice(choice.experts, mean.expand_as(choice.weights))
    return choice


def _dequantised(inputs: Values, name: str, expert: int, mistake: str) -> torch.Tensor:
    weights = tensor(inputs, name)[expert].to(torch.float32)
    if name + "_scale" not in inputs:
        return weights
    scales = tensor(inputs, name + "_scale")[expert]
    if mistake == "scale-transposed" and name == "gemm1_weights":
        scales = scales.t()
    if mistake == "scale-shifted":
        scales = scales.roll(1, -1)
    return weights * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def compute(form: Form, inputs: Values, *, kernel: Kernel | None = None, mistake: str = "") -> torch.Tensor:
    """The output in bfloat16, computed in float32 with a kernel's roundings or a mistake."""
    kernel = kernel or Kernel()
    choice = _choice(form, inputs, mistake)
    weights = kernel.weight(choice.weights.to(torch.float32))
    hidden = tensor(inputs, "hidden_states").to(torch.float32)
    if form.scaling == Scaling.FP8_BLOCK and mistake != "no-hidden-scale":
        hidden = hidden * tensor(inputs, "hidden_states_scale").t().repeat_interleave(BLOCK, 1)
    hidden = kernel.token(hidden)
    if mistake == "token-shifted":
        hidden = hidden.roll(1, 0)
    offset = inputs.get("local_expert_offset", 0)
    assert isinstance(offset, int)
    local = choice.experts - (0 if mistake == "no-offset" else offset)
    output = torch.zeros_like(hidden)
    for expert in range(form.local):
        tokens, slots = torch.nonzero(local == expert, as_tuple=True)
        if not len(tokens):
            continue
        used = (expert + 1) % form.local if mistake == "next-expert" else expert
        weight = weights[tokens, slots][:, None]
        early = form.weight_on_input and mistake != "weight-on-output"
        first = hidden[tokens] * weight if early else hidden[tokens]
        y = _expert(_Run(form, inputs, kernel, mistake), used, first)
        output.index_add_(0, tokens, y if early else y * weight)
    return (output * {"zeros": 0.0, "sign": -1.0, "slope": 1.02}.get(mistake, 1.0)).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Run:
    form: Form
    inputs: Values
    kernel: Kernel
    mistake: str


def _expert(run: _Run, expert: int, x: torch.Tensor) -> torch.Tensor:
    gemm1 = _dequantised(run.inputs, "gemm1_weights", expert, run.mistake)
    gemm2 = _dequantised(run.inputs, "gemm2_weights", expert, run.mistake)
    up, gate = run.kernel.first(x @ gemm1.t()).chunk(2, -1)
    last: torch.Tensor | float = 1.0
    if run.form.scaling == Scaling.FP8_TENSOR:
        scales = [tensor(run.inputs, f"output1_scales_{kind}")[expert] for kind in ("scalar", "gate_scalar")]
        last = tensor(run.inputs, "output2_scales_scalar")[expert]
        if run.mistake == "gate-scale-on-up":
            scales.reverse()
        up, gate = up * scales[0], gate * scales[1]
    if run.mistake == "swapped":
        up, gate = gate, up
    active = run.kernel.active(torch.nn.functional.silu(gate) * up)
    return run.kernel.result(active @ gemm2.t() * last)
