"""Laws of rotary embeddings."""

import torch

from traceproof.ops.common.laws import BATCH, added, other_inputs, times
from traceproof.ops.laws import Experiment, Law, Subject, doubled, permutation


def _rope_heads(subject: Subject) -> Experiment | None:
    """Heads of q and of k, where they are told apart."""
    if subject.tensor("q").dim() != 3:
        return None
    orders = {name: permutation(subject, subject.tensor(name).shape[1]) for name in ("q", "k")}
    values = subject.with_inputs(**{name: subject.tensor(name)[:, order] for name, order in orders.items()})
    outs = dict(zip(subject.definition.outputs, orders.values(), strict=True))
    return other_inputs(
        values, right=lambda outputs: {name: value[:, outs[name]] for name, value in outputs.items()}
    )


def _rope_sum(subject: Subject) -> Experiment:
    """A rotation is linear: q with every other channel zero, and the rest, add up."""
    even = torch.arange(subject.tensor("q").shape[-1]) % 2 == 0
    parts = [
        subject.with_inputs(**{name: subject.tensor(name).masked_fill(mask, 0) for name in ("q", "k")})
        for mask in (even, ~even)
    ]
    return Experiment(tuple(parts), added)


def _rope_double(subject: Subject) -> Experiment:
    values = subject.with_inputs(**{name: doubled(subject.tensor(name)) for name in ("q", "k")})
    return other_inputs(values, right=times(2, *subject.definition.outputs))


LAWS = (
    *BATCH,
    Law("q and k doubled", _rope_double, exact=True),
    Law("heads permuted", _rope_heads, exact=True),
    Law("channels split and added", _rope_sum),
)
