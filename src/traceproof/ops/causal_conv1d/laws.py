"""Laws of causal_conv1d."""

from traceproof.ops.common.laws import BATCH, other_inputs, unchanged
from traceproof.ops.laws import Experiment, Law, Subject, permutation

CHANNELS = {"x": 1, "conv_state": 1, "weight": 0, "bias": 0}


def _channels(subject: Subject) -> Experiment:
    """The channels in another order."""
    order = permutation(subject, len(subject.tensor("weight")))
    moved = {
        name: subject.tensor(name).index_select(axis, order)
        for name, axis in CHANNELS.items()
        if name in subject.inputs
    }
    return other_inputs(
        subject.with_inputs(**moved),
        unchanged,
        lambda outputs: {name: value[:, order] for name, value in outputs.items()},
    )


LAWS = (*BATCH, Law("channels permuted", _channels))
