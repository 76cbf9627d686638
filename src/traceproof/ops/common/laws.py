"""Laws of every op whose parts are independent, and what laws are made of."""

from collections.abc import Callable, Mapping

import torch

from traceproof.ops.common.batch import batch_of
from traceproof.ops.laws import Experiment, Law, Outputs, Subject, Tensors, Values, permutation, taken

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
    batch = batch_of(subject)
    if batch is None or batch.count < 2:
        return None
    whole, cut = list(range(batch.count)), (batch.count + 1) // 2
    halves = [whole[:cut], whole[cut:]]
    values = [batch.select(half) for half in halves]

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        picked = []
        for half, inputs, found in zip(halves, values, outputs[1:], strict=True):
            part = batch_of(subject, inputs)
            assert part is not None
            picked.append(part.pick(found, range(len(half))))
        joined = {name: torch.cat([part[name] for part in picked]) for name in outputs[0]}
        return joined, batch.pick(outputs[0], whole)

    return Experiment(tuple(values), sides)


BATCH = (Law("batch order", _order), Law("batch split and concatenated", _split))


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
