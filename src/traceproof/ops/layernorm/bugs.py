"""Answers of layernorm."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.common.formula import Wide, by
from traceproof.ops.common.quant import FP8_MAX
from traceproof.ops.layernorm.oracle import norm

Normed = Callable[[torch.Tensor, float], torch.Tensor]


def _answer(
    name: str, normed: Normed = norm, *, weight: float = 1.0, bias: float = 1.0, plus: float = 0.0
) -> Answer:
    """The norm by another way, with the weight and the bias taken so many times."""

    def formula(wide: Wide) -> Tensors:
        gain = wide["weight"] * weight + (1 - weight) + plus
        y = normed(wide["hidden_states"], wide.number("eps")) * gain + wide["bias"] * bias
        if "output" in wide.definition.outputs:
            return {"output": y}
        return {"out": (y / wide.number("scale")).clamp(-FP8_MAX, FP8_MAX)}

    return by(name, formula)


def _by_squares(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The variance as the mean of squares less the square of the mean, in float64: in float32 it may cancel."""
    mean = x.double().mean(-1, keepdim=True)
    variance = (x.double() ** 2).mean(-1, keepdim=True) - mean**2
    return ((x - mean) * torch.rsqrt(variance + eps)).float()


def _divided(x: torch.Tensor, eps: float, *, by_count: Callable[[int], int]) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).sum(-1, keepdim=True) / by_count(x.shape[-1]) + eps)


ANSWERS = Answers(
    right=(
        _answer("float32 throughout"),
        _answer("float64, rounded once", lambda x, eps: norm(x.double(), eps)),
        _answer("variance by squares", _by_squares),
    ),
    wrong=(
        _answer("eps x 10", lambda x, eps: norm(x, eps * 10)),
        _answer("eps x 0.1", lambda x, eps: norm(x, eps / 10)),
        _answer("divided by n - 1", lambda x, eps: _divided(x, eps, by_count=lambda count: count - 1)),
        _answer(
            "mean kept, as in a root mean square norm",
            lambda x, eps: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps),
        ),
        _answer(
            "mean of half of the row",
            lambda x, eps: (
                norm(x - x[..., : x.shape[-1] // 2].mean(-1, keepdim=True), eps)
                + x[..., : x.shape[-1] // 2].mean(-1, keepdim=True) * 0.05
            ),
        ),
        _answer("weight dropped", weight=0.0),
        _answer("weight plus one", plus=1.0),
        _answer("bias dropped", bias=0.0),
        _answer("bias subtracted", bias=-1.0),
    ),
)
