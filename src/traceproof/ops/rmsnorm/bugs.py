"""Answers of rmsnorm."""

import torch

from traceproof.ops.answers import Answer, Answers, Subject, Tensors
from traceproof.ops.rmsnorm.oracle import RmsNorm


def _x(subject: Subject) -> torch.Tensor:
    x = subject.tensor("hidden_states").float()
    residual = subject.inputs.get("residual")
    return x + residual.float() if isinstance(residual, torch.Tensor) else x


def _eps(subject: Subject) -> float:
    assert isinstance(subject.op, RmsNorm)
    return subject.op.eps(subject.definition)


def _norm(subject: Subject, mean_square: torch.Tensor, weight: torch.Tensor, *, factor: float = 1.0) -> Tensors:
    """Rows by a mean square, an eps `factor` times the right one, and a weight."""
    x = _x(subject)
    y = x * torch.rsqrt(mean_square + _eps(subject) * factor) * weight
    return subject.rounded({"output": y, "residual_out": x})


def _mean(x: torch.Tensor) -> torch.Tensor:
    return (x * x).mean(-1, keepdim=True)


def _weight(subject: Subject) -> torch.Tensor:
    return subject.tensor("weight").float()


def _chunked(subject: Subject) -> Tensors:
    x = _x(subject)
    parts = [(part * part).sum(-1, keepdim=True) for part in torch.split(x.flip(-1), 48, dim=-1)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return _norm(subject, total / x.shape[-1], _weight(subject))


def _rounded_before_weight(subject: Subject) -> Tensors:
    """As models in plain PyTorch do it: the normalised row is rounded, then multiplied by the weight."""
    x = _x(subject)
    hidden = subject.tensor("hidden_states")
    y = (x * torch.rsqrt(_mean(x) + _eps(subject))).to(hidden.dtype)
    return subject.rounded({"output": y.float() * _weight(subject), "residual_out": x})


def _other_eps(factor: float) -> Answer:
    def make(subject: Subject) -> Tensors:
        return _norm(subject, _mean(_x(subject)), _weight(subject), factor=factor)

    return Answer(f"eps x {factor:g}", make)


def _partial_variance(subject: Subject) -> Tensors:
    x = _x(subject)
    return _norm(subject, _mean(x[..., : x.shape[-1] // 2]), _weight(subject))


def _centred(subject: Subject) -> Tensors:
    x = _x(subject)
    return _norm(subject, _mean(x - x.mean(-1, keepdim=True)), _weight(subject))


def _without_residual(subject: Subject) -> Tensors | None:
    if "residual" not in subject.inputs:
        return None
    residual = torch.zeros_like(subject.tensor("residual"))
    return subject.floor(residual=residual)


RIGHT = (
    Answer("float32 throughout", lambda subject: _norm(subject, _mean(_x(subject)), _weight(subject))),
    Answer("chunked, in the opposite order", _chunked),
    Answer("rounded before the weight", _rounded_before_weight),
)
WRONG = (
    _other_eps(10.0),
    _other_eps(0.1),
    Answer("variance over half of the row", _partial_variance),
    Answer("mean subtracted, as in a layer norm", _centred),
    Answer("weight plus one", lambda subject: _norm(subject, _mean(_x(subject)), _weight(subject) + 1)),
    Answer(
        "weight dropped", lambda subject: _norm(subject, _mean(_x(subject)), torch.ones_like(_weight(subject)))
    ),
    Answer("residual dropped", _without_residual),
)

ANSWERS = Answers(RIGHT, WRONG)
