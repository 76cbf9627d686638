"""Laws of matrix products."""

import torch

from traceproof.ops.common.laws import BATCH, added, other_inputs, permuted, times
from traceproof.ops.gemm.oracle import roles
from traceproof.ops.laws import Experiment, Law, Subject, doubled


def _doubled_a(subject: Subject) -> Experiment | None:
    if "tiny" in subject.case.params.get("rows", ()):
        return None  # products below float16's normal numbers round more coarsely than their doubles
    names = roles(subject.definition)
    values = subject.with_inputs(**{names.a: doubled(subject.tensor(names.a))})
    return other_inputs(values, right=times(2, names.c))


def _k_permuted(subject: Subject) -> Experiment | None:
    names = roles(subject.definition)
    return permuted({names.a: 1, names.b: 1})(subject)


def _n_permuted(subject: Subject) -> Experiment | None:
    return permuted({roles(subject.definition).b: 0}, 1)(subject)


def _k_split(subject: Subject) -> Experiment:
    """The first half of K with the rest zero, and the other way round, add up."""
    names = roles(subject.definition)
    a = subject.tensor(names.a)
    first = torch.arange(a.shape[1]) < a.shape[1] // 2
    halves = (a.masked_fill(~first, 0), a.masked_fill(first, 0))
    return Experiment(tuple(subject.with_inputs(**{names.a: half}) for half in halves), added)


LAWS = (
    *BATCH,
    Law("A doubled", _doubled_a, exact=True),
    Law("K permuted", _k_permuted),
    Law("rows of B permuted", _n_permuted),
    Law("K split and added", _k_split),
)
