"""Laws of recurrences: linear in values and state, slots that can be moved."""

import torch

from traceproof.ops.common.laws import added, other_inputs, times
from traceproof.ops.common.recurrent_bugs import state_names
from traceproof.ops.laws import Experiment, Law, Subject, permutation


def _doubled(subject: Subject) -> Experiment:
    """Values and state doubled: everything doubles."""
    source = "v" if "v" in subject.inputs else "x"
    names = [
        name for name in (source, state_names(subject)[0]) if isinstance(subject.inputs.get(name), torch.Tensor)
    ]
    changes = {name: subject.tensor(name) * 2 for name in names}
    return other_inputs(subject.with_inputs(**changes), times(0.5, *subject.definition.outputs))


def _superposed(subject: Subject) -> Experiment | None:
    """The answer to values without a state plus that to a state without values."""
    source, (before, _) = ("v" if "v" in subject.inputs else "x"), state_names(subject)
    if not isinstance(subject.inputs[before], torch.Tensor):
        return None
    calls = tuple(
        subject.with_inputs(**{name: torch.zeros_like(subject.tensor(name))}) for name in (before, source)
    )
    return Experiment(calls, added)


def _slots(subject: Subject) -> Experiment | None:
    """The pool's slots moved, the indices with them."""
    before, after = state_names(subject)
    index = next((name for name in ("initial_state_indices", "state_batch_indices") if name in subject.inputs), "")
    if not index or len(subject.tensor(before)) < 2:
        return None
    order = permutation(subject, len(subject.tensor(before)))
    back, old = torch.argsort(order), subject.tensor(index)
    moved = torch.where(old < 0, old, order[old.clamp_min(0).long()].to(old.dtype))
    values = subject.with_inputs(**{before: subject.tensor(before)[back], index: moved})
    return other_inputs(
        values, right=lambda outputs: {n: v[back] if n == after else v for n, v in outputs.items()}
    )


LINEAR = (
    Law("values and state doubled", _doubled, exact=True),
    Law("values and state superposed", _superposed),
    Law("slots of the pool permuted", _slots, exact=True),
)
