"""Answers of rope, by what is done to the inputs before and the outputs after a right rotation."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Subject, Tensors, both_precisions


def _cache(name: str, change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> Answer:
    """A right rotation by another cache, made of the cosines and the sines."""

    def make(subject: Subject) -> Tensors:
        cos, sin = subject.tensor("cos_sin_cache").chunk(2, -1)
        return subject.floor(cos_sin_cache=torch.cat(change(cos, sin), -1))

    return Answer(name, make)


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


ANSWERS = Answers(
    right=both_precisions("float32, rounded once", "float64, rounded once"),
    wrong=(
        _cache("rotated the other way", lambda cos, sin: (cos, -sin)),
        _cache("cosine and sine swapped", lambda cos, sin: (sin, cos)),
        Answer("the other pairing of channels", _other_pairs),
        Answer("position plus one", _next_position),
        Answer("positions ignored", _by_row),
        Answer("keys not rotated", lambda subject: subject.floor() | {"k_out": subject.tensor("k").clone()}),
    ),
)
