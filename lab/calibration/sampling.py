"""flashinfer-bench's rule for samplers, written here anew: a mask of tokens, and the distance of 500,000 draws.

The draws of an answer are made at once, so its own trials are replaced. What is compared with is the distribution
that this mask leaves, as flashinfer-bench 0.1.2 computes it, and not the oracle's.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.answers import Answer
from traceproof.ops.base import Op
from traceproof.ops.cases import Case
from traceproof.run.case import Subject

NAME = "flashinfer-bench sampling"
FORMULA = """100 draws in a mask (no token below the k-th largest; sums of sorted probabilities up to top_p +
0.05); 500,000 draws within a total variation of 0.2 of what the mask leaves"""
CHECKED, DRAWS = 100, 500_000  # sampling_validation_trials, and how many draws make a distribution
DISTANCE = 0.2  # sampling_tvd_threshold
EPSILON = 0.05


@dataclass(frozen=True, slots=True)
class Drawn:
    """What flashinfer-bench sees of a sampler: a draw outside of the mask, and the largest distance of a row."""

    outside: bool
    distance: float

    @property
    def refused(self) -> bool:
        """Whether it is refused by the default threshold."""
        return self.outside or self.distance > DISTANCE


def drawn(answer: Answer, subjects: Iterable[Subject]) -> Drawn | None:
    """The worst over all cases; None: the answer is given in none."""
    found: list[Drawn] = []
    for subject in subjects:
        outputs = answer.make(replace(subject, op=drawing(subject.op)))
        if outputs is None or not len(subject.tensor("probs")):
            continue
        samples, mask = outputs["samples"], valid(subject)
        expected = subject.tensor("probs").float() * mask
        expected /= expected.sum(-1, keepdim=True)
        rows = torch.arange(len(mask)).expand(CHECKED, -1)
        outside = not bool(mask[rows, samples[:CHECKED]].all())
        counts = torch.stack([torch.bincount(one, minlength=mask.shape[1]) for one in samples.T])
        apart = (counts.float() / DRAWS - expected).abs().sum(-1) / 2
        found.append(Drawn(outside, float(apart.max())))
    return Drawn(any(one.outside for one in found), max(one.distance for one in found)) if found else None


def drawing(op: Op) -> Op:
    """An op whose answers make DRAWS draws of each row."""

    def trials(definition: Definition, case: Case) -> int:
        del definition, case
        return DRAWS

    many = copy(op)
    many.trials = trials  # type: ignore[method-assign]
    return many


def valid(subject: Subject) -> torch.Tensor:
    """Mask [rows, vocabulary]: the tokens that are let pass."""
    probs = subject.tensor("probs").float()
    mask = torch.ones_like(probs, dtype=torch.bool)
    for row, values in enumerate(probs):
        ordered, places = values.sort(descending=True)
        if "top_k" in subject.inputs:
            count = int(subject.tensor("top_k")[row])
            if 0 < count < len(values):
                mask[row] &= values >= ordered[count - 1]
        if "top_p" in subject.inputs:
            share = float(subject.tensor("top_p")[row])
            if 0 < share < 1:
                nucleus = ordered.cumsum(0) <= share + EPSILON
                nucleus[0] |= not bool(nucleus.any())
                mask[row] &= torch.zeros_like(mask[row]).index_fill_(0, places[nucleus], value=True)
    return mask
