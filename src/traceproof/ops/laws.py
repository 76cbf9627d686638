"""What a law is, and an experiment that puts a reference to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.answers import Subject, Tensors, Values

__all__ = ["Subject", "Tensors", "Values"]  # of other modules, for files of laws

# Outputs so far: those of the case itself first, then those of the calls in turn.
Outputs = Sequence[Tensors]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Further calls of the reference, and two things that its outputs must then make equal."""

    calls: tuple[Values | Callable[[Outputs], Values], ...]  # inputs, or what gives them from the outputs so far
    # the two sides, by output name, with the same shapes and the outputs' dtypes or float64. It is also applied to
    # the oracle's and the floor's outputs, which tells how far rounding may bring the two apart.
    sides: Callable[[Outputs], tuple[Tensors, Tensors]]


@dataclass(frozen=True, slots=True)
class Law:
    """A law."""

    name: str  # in words
    # the experiment for a case; None where the law says nothing about it
    design: Callable[[Subject], Experiment | None]
    exact: bool = False  # bits must agree; otherwise the two sides may differ by rounding
    once: bool = False  # a sampler draws once for each call, all from the same seed
    # whether it is a law of this definition, where an op_type has several forms
    holds: Callable[[Definition], bool] = lambda _: True


def generator(subject: Subject) -> torch.Generator:
    """Random numbers that depend on the case's seed alone."""
    return torch.Generator().manual_seed(subject.seed + 1)


def permutation(subject: Subject, count: int) -> torch.Tensor:
    """int64 [count]: a permutation that leaves things in place only where there is but one."""
    order = torch.randperm(count, generator=generator(subject))
    return order.roll(1) if torch.equal(order, torch.arange(count)) else order


def taken(tensor: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    """`index_select` for all dtypes; torch has none for some that are a byte wide."""
    narrow = tensor.dtype.itemsize == 1
    found = (tensor.view(torch.uint8) if narrow else tensor).index_select(axis, index)
    return found.view(tensor.dtype) if narrow else found


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Twice the values: exact in every binary format, short of its ends."""
    return tensor * 2


def laws_of(definition: Definition) -> tuple[Law, ...]:
    """The laws of a definition; some may say nothing about any of its cases."""
    found: tuple[Law, ...] = registry.attribute(definition.op_type, "laws", "LAWS") or ()
    return tuple(law for law in found if law.holds(definition))
