"""Answers of gated_residual_rmsnorm."""

from collections.abc import Callable

import torch
from torch.nn import functional

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.common.formula import Wide, by
from traceproof.ops.common.norms import rms_norm

Norm = Callable[[torch.Tensor, float], torch.Tensor]


def _answer(
    name: str, norm: Norm = rms_norm, *, first: str = "alpha", second: str = "beta", centre: float = 1.0
) -> Answer:
    """The sum by another norm, with other gains, or with the centre of the gain taken so many times."""

    def formula(wide: Wide) -> Tensors:
        gain = wide["weight"] + wide.number("gain_center") * centre
        branch = norm(wide["branch"] * gain, wide.number("eps"))
        return {"output": wide[first] * wide["residual"] + wide[second] * branch}

    return by(name, formula)


def _weighted_after(wide: Wide) -> Tensors:
    gain = wide["weight"] + wide.number("gain_center")
    normed = rms_norm(wide["branch"], wide.number("eps")) * gain
    return {"output": wide["alpha"] * wide["residual"] + wide["beta"] * normed}


def _residual_within(wide: Wide) -> Tensors:
    branch = wide["branch"] * (wide["weight"] + wide.number("gain_center")) + wide["residual"]
    return {"output": wide["alpha"] * wide["residual"] + wide["beta"] * rms_norm(branch, wide.number("eps"))}


def _rounded(x: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, eps).bfloat16().float()


ANSWERS = Answers(
    right=(
        _answer("float32 throughout"),
        _answer("by PyTorch", lambda x, eps: functional.rms_norm(x, x.shape[-1:], eps=eps)),
        _answer("a reciprocal root", lambda x, eps: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)),
    ),
    wrong=(
        _answer("eps x 10", lambda x, eps: rms_norm(x, eps * 10)),
        _answer("eps dropped", lambda x, _: rms_norm(x, 0.0)),
        _answer("the branch in bfloat16", _rounded),
        _answer("gains exchanged", first="beta", second="alpha"),
        _answer("one gain for both", second="alpha"),
        _answer("centre of the gain dropped", centre=0.0),
        by("weighted after the norm", _weighted_after),
        by("residual within the norm", _residual_within),
    ),
)
