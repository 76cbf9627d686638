"""Laws of the selective state update: groups that can be moved."""

from traceproof.ops.common.laws import BATCH, other_inputs, reordered, scaled, times
from traceproof.ops.common.recurrent_laws import LINEAR
from traceproof.ops.laws import Experiment, Law, Subject, permutation


def _mamba_groups(subject: Subject) -> Experiment | None:
    """Groups of B and C with the heads that read them."""
    groups, heads = subject.tensor("B").shape[1], subject.tensor("x").shape[1]
    if heads < 2:
        return None
    outer, inner = permutation(subject, groups), permutation(subject, heads // groups)
    order = (outer[:, None] * (heads // groups) + inner).flatten()
    changes = {name: subject.tensor(name)[:, outer] for name in ("B", "C")}
    changes |= {name: subject.tensor(name)[:, order] for name in ("state", "x", "dt")}
    changes |= {name: subject.tensor(name)[order] for name in ("A", "D", "dt_bias")}
    return other_inputs(subject.with_inputs(**changes), right=reordered(order, 1))


LAWS = (
    *BATCH,
    *LINEAR,
    Law("C and D doubled", scaled("C", "D", output=times(0.5, "output")), exact=True),
    Law("groups and heads permuted", _mamba_groups),
)
