"""Answers of rope, by what is done to the inputs before and the outputs after a right rotation."""

import torch

from traceproof.ops.answers import Answer, Answers, Subject, Tensors, both_precisions


def _halves(subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
    cache = subject.tensor("cos_sin_cache")
    half = cache.shape[-1] // 2
    return cache[:, :half], cache[:, half:]


def _cache(subject: Subject, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    return subject.floor(cos_sin_cache=torch.cat([cos, sin], -1))


def _reversed(subject: Subject) -> Tensors:
    cos, sin = _halves(subject)
    return _cache(subject, cos, -sin)


def _swapped(subject: Subject) -> Tensors:
    cos, sin = _halves(subject)
    return _cache(subject, sin, cos)


def _other_pairs(subject: Subject) -> Tensors:
    """Halves read as interleaved pairs, or the other way round: the same rotation of reordered channels."""
    rotary = subject.tensor("cos_sin_cache").shape[-1]
    order = torch.arange(rotary).view(2, -1).T.reshape(-1)  # interleaves; its inverse takes apart
    inverse = torch.argsort(order)

    def reorder(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., :rotary][..., index], x[..., rotary:]], -1)

    changes = {name: reorder(subject.tensor(name), inverse) for name in ("q", "k")}
    return {name: reorder(value, order) for name, value in subject.floor(**changes).items()}


def _next_position(subject: Subject) -> Tensors:
    last = len(subject.tensor("cos_sin_cache")) - 1
    positions = (subject.tensor("positions") + 1).clamp_max(max(last, 0))
    return subject.floor(positions=positions)


def _by_row(subject: Subject) -> Tensors:
    """Positions ignored: token i is at position i."""
    count = len(subject.tensor("cos_sin_cache"))
    positions = torch.arange(len(subject.tensor("positions"))) % max(count, 1)
    return subject.floor(positions=positions)


def _keys_untouched(subject: Subject) -> Tensors:
    return subject.floor() | {"k_out": subject.tensor("k").clone()}


ANSWERS = Answers(
    right=both_precisions("float32, rounded once", "float64, rounded once"),
    wrong=(
        Answer("rotated the other way", _reversed),
        Answer("cosine and sine swapped", _swapped),
        Answer("the other pairing of channels", _other_pairs),
        Answer("position plus one", _next_position),
        Answer("positions ignored", _by_row),
        Answer("keys not rotated", _keys_untouched),
    ),
)
