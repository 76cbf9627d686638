"""MoE as kernels compute it, with their roundings. For the tests of the gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from planted_fp4 import requantise_fp4

from traceproof.ops.base import Values, tensor
from traceproof.ops.common.quant import BLOCK, requantise_fp8, to_fp8
from traceproof.ops.moe.form import Form, Scaling
from traceproof.ops.moe.routing import choose, read

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


def compute(form: Form, inputs: Values, *, kernel: Kernel | None = None) -> torch.Tensor:
    """The output in bfloat16, computed in float32 with a kernel's roundings."""
    kernel = kernel or Kernel()
    if form.routing.given:
        choice = read(form.routing, tensor(inputs, "topk_ids"))
    else:
        bias = tensor(inputs, "routing_bias") if form.has_bias else None
        factor = inputs.get("routed_scaling_factor", 1.0)
        assert isinstance(factor, float)
        choice = choose(form.routing, tensor(inputs, "routing_logits").to(torch.float64), bias, factor)
    weights = kernel.weight(choice.weights.to(torch.float32))
    hidden = tensor(inputs, "hidden_states").to(torch.float32)
    if form.scaling == Scaling.FP8_BLOCK:
        hidden = hidden * tensor(inputs, "hidden_states_scale").t().repeat_interleave(BLOCK, 1)
    hidden = kernel.token(hidden)
    offset = inputs.get("local_expert_offset", 0)
    assert isinstance(offset, int)
    output = torch.zeros_like(hidden)
    for expert in range(form.local):
        tokens, slots = torch.nonzero(choice.experts - offset == expert, as_tuple=True)
        if len(tokens):
            weight = weights[tokens, slots][:, None]
            x = hidden[tokens] * weight if form.weight_on_input else hidden[tokens]
            y = _expert(form, inputs, kernel, expert, x)
            output.index_add_(0, tokens, y if form.weight_on_input else y * weight)
    return output.to(torch.bfloat16)


def _expert(form: Form, inputs: Values, kernel: Kernel, expert: int, x: torch.Tensor) -> torch.Tensor:
    gemm1, gemm2 = (_dequantised(inputs, name, expert) for name in ("gemm1_weights", "gemm2_weights"))
    up, gate = kernel.first(x @ gemm1.t()).chunk(2, -1)
    last: torch.Tensor | float = 1.0
    if form.scaling == Scaling.FP8_TENSOR:
        of_up, of_gate = (tensor(inputs, f"output1_scales_{kind}")[expert] for kind in ("scalar", "gate_scalar"))
        last = tensor(inputs, "output2_scales_scalar")[expert]
        up, gate = up * of_up, gate * of_gate
    active = kernel.active(torch.nn.functional.silu(gate) * up)
    return kernel.result(active @ gemm2.t() * last)


def _dequantised(inputs: Values, name: str, expert: int) -> torch.Tensor:
    weights = tensor(inputs, name)[expert].to(torch.float32)
    if name + "_scale" not in inputs:
        return weights
    return weights * tensor(inputs, name + "_scale")[expert].repeat_interleave(BLOCK, 0).repeat_interleave(
        BLOCK, 1
    )
