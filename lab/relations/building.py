"""What a metamorphic relation is, and what relations of many op_types are made of.

A relation says how a reference's outputs on changed inputs follow from those on the case's own, without an oracle.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Tensors, Values, taken
from traceproof.ops.batch import batch_of, halved
from traceproof.ops.op import Subject

# Outputs so far: those of the case itself first, then those of the calls in turn.
Outputs = Sequence[Tensors]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Further calls of the reference, and two things that its outputs must then make equal."""

    calls: tuple[Values | Callable[[Outputs], Values], ...]  # inputs, or what gives them from the outputs so far
    # the two sides, by output name, with the same shapes and the outputs' dtypes or float64. It is also applied to
    # the oracle's and the baseline's outputs, which tells how far rounding may bring the two apart.
    sides: Callable[[Outputs], tuple[Tensors, Tensors]]


@dataclass(frozen=True, slots=True)
class Relation:
    """A metamorphic relation."""

    name: str  # in words
    # the experiment for a case; None where the relation says nothing about it
    design: Callable[[Subject], Experiment | None]
    exact: bool = False  # bits must agree; otherwise the two sides may differ by rounding
    once: bool = False  # a sampler draws once for each call, all from the same seed
    # whether it holds for this definition, where an op_type has several forms
    holds: Callable[[Definition], bool] = lambda _: True


def generator(subject: Subject) -> torch.Generator:
    """Random numbers that depend on the case's seed alone."""
    return torch.Generator().manual_seed(subject.seed + 1)


def permutation(subject: Subject, count: int) -> torch.Tensor:
    """int64 [count]: a permutation that leaves things in place only where there is but one."""
    order = torch.randperm(count, generator=generator(subject))
    return order.roll(1) if torch.equal(order, torch.arange(count)) else order


Side = Callable[[Tensors], Tensors]


def unchanged(outputs: Tensors) -> Tensors:
    """The outputs as they are."""
    return dict(outputs)


def other_inputs(values: Values, left: Side = unchanged, right: Side = unchanged) -> Experiment:
    """One further call: `left` of its outputs equals `right` of the case's own."""
    return Experiment((values,), lambda outputs: (left(outputs[1]), right(outputs[0])))


def added(outputs: Outputs) -> tuple[Tensors, Tensors]:
    """Sides of two further calls whose outputs add up to the case's own."""
    total = {
        name: (outputs[1][name].double() + outputs[2][name].double()).to(value.dtype)
        for name, value in outputs[0].items()
    }
    return total, dict(outputs[0])


def reordered(order: torch.Tensor, axis: int) -> Side:
    """All outputs with the entries of one axis in another order."""
    return lambda outputs: {name: taken(value, axis, order) for name, value in outputs.items()}


def halved_all(outputs: Tensors) -> Tensors:
    """All outputs times a half, in their dtype."""
    return {name: value * 0.5 for name, value in outputs.items()}


def times(factor: float, *names: str) -> Side:
    """Some outputs times a number, in their dtype."""
    return lambda outputs: {name: value * factor if name in names else value for name, value in outputs.items()}


def _order(subject: Subject) -> Experiment | None:
    batch = batch_of(subject)
    if batch is None or batch.count < 2:
        return None
    order = permutation(subject, batch.count).tolist()
    values = batch.select(order)
    moved = batch_of(subject, values)
    assert moved is not None
    every = range(batch.count)
    return other_inputs(values, lambda outputs: moved.pick(outputs, every), lambda out: batch.pick(out, order))


def _split(subject: Subject) -> Experiment | None:
    halves = halved(subject)
    if halves is None:
        return None
    return Experiment(halves.inputs, lambda outputs: (halves.joined(outputs[1:]), halves.whole(outputs[0])))


BATCH = (Relation("batch order", _order), Relation("batch split and concatenated", _split))


def scaled(*names: str, output: Side, factor: float = 2.0) -> Callable[[Subject], Experiment | None]:
    """Some inputs times a power of two; None where one is missing."""

    def design(subject: Subject) -> Experiment | None:
        if any(not isinstance(subject.inputs.get(name), torch.Tensor) for name in names):
            return None
        changes = {name: subject.tensor(name) * factor for name in names}
        return other_inputs(subject.with_inputs(**changes), output)

    return design


def negated(*names: str) -> Callable[[Subject], Experiment]:
    """Those of some inputs that are there with the other sign, and so every output."""

    def design(subject: Subject) -> Experiment:
        values = subject.with_inputs(**{name: -subject.tensor(name) for name in names if name in subject.inputs})
        return other_inputs(values, lambda outputs: {name: -value for name, value in outputs.items()})

    return design


def permuted(axes: Mapping[str, int], outputs: int | None = None) -> Callable[[Subject], Experiment | None]:
    """One axis of some inputs, those that are there, in another order, and so an axis of the outputs, if any is.

    None where there is nothing to permute.
    """

    def design(subject: Subject) -> Experiment | None:
        there = {name: axis for name, axis in axes.items() if isinstance(subject.inputs.get(name), torch.Tensor)}
        first, axis = next(iter(there.items()))
        order = permutation(subject, subject.tensor(first).shape[axis])
        if len(order) < 2:
            return None
        values = subject.with_inputs(
            **{name: taken(subject.tensor(name), at, order) for name, at in there.items()}
        )
        return other_inputs(values, right=unchanged if outputs is None else reordered(order, outputs))

    return design


def columns(subject: Subject) -> Experiment:
    """The last axis of the first output in another order, wherever it is the last one."""
    specs = subject.definition.outputs
    last = (next(iter(specs.values())).shape or ("",))[-1]
    moved = [name for name, spec in subject.definition.inputs.items() if (spec.shape or ("",))[-1] == last]
    moved = [name for name in moved if isinstance(subject.inputs[name], torch.Tensor)]
    order = permutation(subject, subject.tensor(moved[0]).shape[-1])
    return other_inputs(
        subject.with_inputs(**{name: subject.tensor(name)[..., order] for name in moved}),
        right=lambda outputs: {
            name: value[..., order] if (specs[name].shape or ("",))[-1] == last else value
            for name, value in outputs.items()
        },
    )
