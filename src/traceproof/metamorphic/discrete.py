"""Laws of outputs that are indices: samplers and the top-k indexer."""

from __future__ import annotations

import torch

from traceproof.calibrate.model import Subject
from traceproof.metamorphic.attention import moved_pages, moved_rows, page_count
from traceproof.metamorphic.common import BATCH, other_inputs, unchanged
from traceproof.metamorphic.model import Experiment, Law, Outputs, doubled, permutation, taken
from traceproof.ops.base import Tensors

ROWS = ("probs", "top_k", "top_p")
LEAST_P = 1e-6  # top-p that leaves the most probable token alone


def _prefix(subject: Subject) -> Experiment | None:
    """The first row alone, from the same seed, draws the same token."""
    if len(subject.tensor("probs")) < 2:
        return None
    values = subject.with_inputs(**{name: subject.tensor(name)[:1] for name in ROWS if name in subject.inputs})
    return other_inputs(values, unchanged, lambda outputs: {"samples": outputs["samples"][..., :1]})


def _rows(subject: Subject) -> Experiment | None:
    probs = subject.tensor("probs")
    if len(probs) < 2:
        return None
    order = permutation(subject, len(probs))
    values = subject.with_inputs(**{name: subject.tensor(name)[order] for name in ROWS if name in subject.inputs})
    return other_inputs(values, unchanged, lambda outputs: {"samples": outputs["samples"][..., order]})


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


SAMPLING = (
    Law("first row alone, same seed", _prefix, exact=True, once=True),
    Law("rows permuted", _rows),
    Law("one token left", _greedy, exact=True, once=True),
    Law("k of the vocabulary and beyond", _wide_k, exact=True, once=True),
)


def _pages(subject: Subject) -> Experiment | None:
    if page_count(subject) < 2:
        return None
    order = permutation(subject, page_count(subject))
    table, page_size = subject.tensor("block_table"), subject.tensor("k_index_cache_fp8").shape[1]
    changes = {**moved_pages(subject, order), "block_table": order[table.long()].to(table.dtype)}
    return other_inputs(
        subject.with_inputs(**changes),
        unchanged,
        lambda outputs: {name: moved_rows(value, order, page_size) for name, value in outputs.items()},
    )


def _heads(subject: Subject) -> Experiment:
    order = permutation(subject, subject.tensor("weights").shape[1])
    changes = {name: taken(subject.tensor(name), 1, order) for name in ("q_index_fp8", "weights")}
    return other_inputs(subject.with_inputs(**changes), unchanged, unchanged)


def _weights(subject: Subject) -> Experiment:
    values = subject.with_inputs(weights=doubled(subject.tensor("weights")))
    return other_inputs(values, unchanged, unchanged)


INDEXER = (
    *BATCH,
    Law("pages permuted", _pages),
    Law("heads permuted", _heads),
    Law("weights doubled", _weights),
)
