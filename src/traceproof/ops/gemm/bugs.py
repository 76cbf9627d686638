"""Answers of gemm."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Subject
from traceproof.ops.base import Tensors
from traceproof.ops.gemm.oracle import roles

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SPLITS = 4


def _answer(name: str, product: Product) -> Answer:
    def make(subject: Subject) -> Tensors:
        names = roles(subject.definition)
        return subject.rounded({names.c: product(subject.tensor(names.a), subject.tensor(names.b))})

    return Answer(name, make)


def _float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float().T


def _split_k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    parts = [_float32(x, y) for x, y in zip(a.chunk(SPLITS, 1), b.chunk(SPLITS, 1), strict=True)]
    return torch.stack(parts).sum(0)


def _blocked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((len(a), len(b)))
    for x, y in zip(torch.split(a.flip(1), 96, dim=1), torch.split(b.flip(1), 96, dim=1), strict=True):
        total += _float32(x, y)
    return total


def _low_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Partial sums kept in the inputs' dtype, as a kernel without a wide accumulator would."""
    total = torch.zeros((len(a), len(b)), dtype=a.dtype)
    for x, y in zip(torch.split(a, 16, dim=1), torch.split(b, 16, dim=1), strict=True):
        total = (total.float() + _float32(x, y)).to(a.dtype)
    return total


def _without(columns: slice) -> Product:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left = a.clone()
        left[:, columns] = 0
        return _float32(left, b)

    return product


def _twice_last(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _float32(a, b) + _float32(a[:, -1:], b[:, -1:])


def _shifted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _float32(a.roll(1, 1), b)


def _untransposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """B's memory read as [K, N]."""
    return a.float() @ b.reshape(a.shape[1], len(b)).float()


ANSWERS = Answers(
    right=(
        _answer("float32 sums", _float32),
        _answer("split-K", _split_k),
        _answer("blocks, in the opposite order", _blocked),
    ),
    wrong=(
        _answer("last column of K dropped", _without(slice(-1, None))),
        _answer("last tile of K dropped", _without(slice(-16, None))),
        _answer("last column of K twice", _twice_last),
        _answer("A shifted by a column", _shifted),
        _answer("B not transposed", _untransposed),
        _answer("sums in the inputs' dtype", _low_sums),
    ),
)
