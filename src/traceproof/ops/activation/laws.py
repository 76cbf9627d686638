"""Laws of activations."""

import torch

from traceproof.ops.common.laws import BATCH, other_inputs, reordered, times
from traceproof.ops.laws import Experiment, Law, Subject, permutation


def _doubled(subject: Subject) -> Experiment:
    """What the activated gate is multiplied by, doubled."""
    gate, up = subject.tensor("input").chunk(2, -1)
    return other_inputs(subject.with_inputs(input=torch.cat([gate, up * 2], -1)), times(0.5, "output"))


def _sign(subject: Subject) -> Experiment:
    gate, up = subject.tensor("input").chunk(2, -1)
    return other_inputs(subject.with_inputs(input=torch.cat([gate, -up], -1)), times(-1.0, "output"))


def _columns(subject: Subject) -> Experiment:
    """Channels moved, the same in both halves."""
    gate, up = subject.tensor("input").chunk(2, -1)
    order = permutation(subject, gate.shape[1])
    return other_inputs(
        subject.with_inputs(input=torch.cat([gate[:, order], up[:, order]], -1)), right=reordered(order, 1)
    )


LAWS = (
    *BATCH,
    Law("second half doubled", _doubled, exact=True),
    Law("sign of the second half", _sign, exact=True),
    Law("columns permuted", _columns, exact=True),
)
