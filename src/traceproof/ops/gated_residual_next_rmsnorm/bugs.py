"""Answers of gated_residual_next_rmsnorm."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.common.formula import Wide, by
from traceproof.ops.common.norms import rms_norm

Norm = Callable[[torch.Tensor, float], torch.Tensor]


def _answer(
    name: str,
    post: Norm = rms_norm,
    after: Norm = rms_norm,
    *,
    gains: str = "alpha beta",
    centre: str = "next_gain_center",
) -> Answer:
    """Both outputs by other norms, gains, or another number for the next gain's centre."""

    def formula(wide: Wide) -> Tensors:
        first, second = gains.split()
        branch = wide["branch"] * (wide["post_weight"] + wide.number("post_gain_center"))
        total = wide[first] * wide["residual"] + wide[second] * post(branch, wide.number("post_eps"))
        gain = wide["next_weight"] + (wide.number(centre) if centre else 0.0)
        return {"residual_out": total, "ffn_input": after(total, wide.number("next_eps")) * gain}

    return by(name, formula)


def _fast(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


ANSWERS = Answers(
    right=(_answer("float32 throughout"), _answer("a reciprocal root", _fast, _fast)),
    wrong=(
        _answer("first eps x 10", post=lambda x, eps: rms_norm(x, eps * 10)),
        _answer("second eps x 10", after=lambda x, eps: rms_norm(x, eps * 10)),
        _answer("second eps x 0.1", after=lambda x, eps: rms_norm(x, eps / 10)),
        _answer("the branch in bfloat16", post=lambda x, eps: rms_norm(x, eps).bfloat16().float()),
        _answer("gains exchanged", gains="beta alpha"),
        _answer("one gain for both", gains="alpha alpha"),
        _answer("the next centre dropped", centre=""),
        _answer("the first centre for both", centre="post_gain_center"),
        _answer("no second norm", after=lambda x, _: x),
        _answer("no first norm", post=lambda x, _: x),
    ),
)
