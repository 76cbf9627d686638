"""Answers of rmsnorm_sigmoid_gate."""

from collections.abc import Callable

import torch
from torch.nn import functional

from traceproof.ops.answers import Answer, Answers
from traceproof.ops.common.formula import by
from traceproof.ops.common.norms import rms_norm

Gate = Callable[[torch.Tensor], torch.Tensor]


def _answer(
    name: str, gate: Gate = torch.sigmoid, norm: Callable[[torch.Tensor, float], torch.Tensor] = rms_norm
) -> Answer:
    return by(name, lambda wide: {"output": norm(wide["input"], wide.number("eps")) * gate(wide["gate"])})


def _over_heads(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean((-2, -1), keepdim=True) + eps)


def _centred(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + eps)


ANSWERS = Answers(
    right=(
        _answer("float32 throughout"),
        _answer("by PyTorch", norm=lambda x, eps: functional.rms_norm(x, x.shape[-1:], eps=eps)),
    ),
    wrong=(
        _answer("eps x 10", norm=lambda x, eps: rms_norm(x, eps * 10)),
        _answer("eps x 0.1", norm=lambda x, eps: rms_norm(x, eps / 10)),
        _answer("norm over heads and channels", norm=_over_heads),
        _answer("mean subtracted in the variance", norm=_centred),
        _answer(
            "variance of half of the row",
            norm=lambda x, eps: x * torch.rsqrt((x[..., ::2] ** 2).mean(-1, keepdim=True) + eps),
        ),
        _answer("gate dropped", gate=torch.ones_like),
        _answer("silu of the gate", gate=functional.silu),
        _answer("tanh of the gate", gate=torch.tanh),
        _answer("sigmoid of minus the gate", gate=lambda gate: torch.sigmoid(-gate)),
        _answer("hard sigmoid", gate=functional.hardsigmoid),
    ),
)
