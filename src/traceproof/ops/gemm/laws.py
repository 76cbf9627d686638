"""Laws of matrix products."""

import torch

from traceproof.ops.common.laws import BATCH, other_inputs, times, unchanged
from traceproof.ops.gemm.oracle import roles
from traceproof.ops.laws import Experiment, Law, Outputs, Subject, Tensors, doubled, permutation


def _doubled_a(subject: Subject) -> Experiment | None:
    if "tiny" in subject.case.params.get("rows", ()):
        return None  # products below float16's normal numbers round more coarsely than their doubles
    names = roles(subject.definition)
    values = subject.with_inputs(**{names.a: doubled(subject.tensor(names.a))})
    return other_inputs(values, unchanged, times(2, names.c))


def _k_permuted(subject: Subject) -> Experiment:
    names = roles(subject.definition)
    order = permutation(subject, subject.tensor(names.a).shape[1])
    values = subject.with_inputs(**{name: subject.tensor(name)[:, order] for name in (names.a, names.b)})
    return other_inputs(values, unchanged, unchanged)


def _n_permuted(subject: Subject) -> Experiment:
    names = roles(subject.definition)
    order = permutation(subject, len(subject.tensor(names.b)))
    values = subject.with_inputs(**{names.b: subject.tensor(names.b)[order]})
    return other_inputs(values, unchanged, lambda outputs: {names.c: outputs[names.c][:, order]})


def _k_split(subject: Subject) -> Experiment:
    """The first half of K with the rest zero, and the other way round, add up."""
    names = roles(subject.definition)
    a = subject.tensor(names.a)
    first = torch.arange(a.shape[1]) < a.shape[1] // 2
    halves = (a.masked_fill(~first, 0), a.masked_fill(first, 0))
    calls = tuple(subject.with_inputs(**{names.a: half}) for half in halves)

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        total = outputs[1][names.c].double() + outputs[2][names.c].double()
        return {names.c: total.to(outputs[0][names.c].dtype)}, dict(outputs[0])

    return Experiment(calls, sides)


LAWS = (
    *BATCH,
    Law("A doubled", _doubled_a, exact=True),
    Law("K permuted", _k_permuted),
    Law("rows of B permuted", _n_permuted),
    Law("K split and added", _k_split),
)
