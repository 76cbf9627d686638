"""Laws of every op whose parts are independent."""

from __future__ import annotations

from collections.abc import Callable

import torch

from traceproof.calibrate.model import Subject
from traceproof.metamorphic.batch import batch_of
from traceproof.metamorphic.model import Experiment, Law, Outputs, permutation
from traceproof.ops.base import Tensors, Values

Side = Callable[[Tensors], Tensors]


def other_inputs(values: Values, left: Side, right: Side) -> Experiment:
    """One further call: `left` of its outputs equals `right` of the case's own."""
    return Experiment((values,), lambda outputs: (left(outputs[1]), right(outputs[0])))


def unchanged(outputs: Tensors) -> Tensors:
    """The outputs as they are."""
    return dict(outputs)


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
