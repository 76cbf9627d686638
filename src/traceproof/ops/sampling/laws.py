"""Laws of samplers."""

import torch

from traceproof.ops.common.laws import other_inputs, permuted
from traceproof.ops.laws import Experiment, Law, Outputs, Subject, Tensors

ROWS = ("probs", "top_k", "top_p")
LEAST_P = 1e-6  # top-p that leaves the most probable token alone


def _prefix(subject: Subject) -> Experiment | None:
    """The first row alone, from the same seed, draws the same token."""
    if len(subject.tensor("probs")) < 2:
        return None
    values = subject.with_inputs(**{name: subject.tensor(name)[:1] for name in ROWS if name in subject.inputs})
    return other_inputs(values, right=lambda outputs: {"samples": outputs["samples"][..., :1]})


def _greedy(subject: Subject) -> Experiment | None:
    """One token left: its probability is the largest of its row."""
    probs = subject.tensor("probs")
    if not len(probs):
        return None
    changes = {}
    if "top_k" in subject.inputs:
        changes["top_k"] = torch.ones_like(subject.tensor("top_k"))
    else:
        changes["top_p"] = torch.full_like(subject.tensor("top_p"), LEAST_P)
    best = probs.amax(-1)

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        drawn = outputs[1]["samples"]
        found = probs.gather(1, drawn.reshape(-1, len(probs)).T.long()).T.reshape(drawn.shape)
        return {"samples": found}, {"samples": best.expand_as(found).clone()}

    return Experiment((subject.with_inputs(**changes),), sides)


def _wide_k(subject: Subject) -> Experiment | None:
    """A k of the whole vocabulary and one beyond it filter nothing."""
    if "top_k" not in subject.inputs or not len(subject.tensor("probs")):
        return None
    k, vocabulary = subject.tensor("top_k"), subject.tensor("probs").shape[1]
    calls = tuple(subject.with_inputs(top_k=torch.full_like(k, vocabulary + more)) for more in (0, 100))
    return Experiment(calls, lambda outputs: (dict(outputs[1]), dict(outputs[2])))


LAWS = (
    Law("first row alone, same seed", _prefix, exact=True, once=True),
    Law("rows permuted", permuted(dict.fromkeys(ROWS, 0), -1)),
    Law("one token left", _greedy, exact=True, once=True),
    Law("k of the vocabulary and beyond", _wide_k, exact=True, once=True),
)
