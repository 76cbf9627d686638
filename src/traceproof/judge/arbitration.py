"""Where implementations disagree: who agrees with whom, and whether a known convention or bug gives this."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from traceproof.judge.output import Expected, passes, shares_limits
from traceproof.ops import registry
from traceproof.ops.base import Subject
from traceproof.ops.compare import IndexSet, Samples
from traceproof.ops.formula import generic_mutants

# Constant factors between an answer and the oracle that have a name.
RATIOS: Mapping[str, float] = {
    "the natural logarithm where base 2 is meant": math.log(2),
    "base 2 where the natural logarithm is meant": 1 / math.log(2),
    "the sign flipped": -1.0,
}
SAME_RATIO = 1e-3  # relative: farther apart than that no bfloat16 output lies from its factor over many elements
MOST = 3  # explanations given; more say that the case tells them not apart


def agree(one: torch.Tensor | None, other: torch.Tensor | None, expected: Expected) -> float | None:
    """How far two answers lie apart, as a part of what the judge allows each of them; at most 1: they agree.

    None where nothing can be said: an output is absent, there is no oracle to take the limit from, or the kind of
    comparison is about sets or draws.
    """
    if one is None or other is None or "" not in expected.oracle:
        return None
    if expected.comparison is None or isinstance(expected.comparison, Samples | IndexSet):
        return None
    if one.shape != other.shape or one.dtype != other.dtype or one.shape != expected.oracle[""].shape:
        return math.inf
    return shares_limits(one, other, expected.oracle, expected.comparison)


def explain(subject: Subject, output: str, actual: torch.Tensor, expected: Expected) -> list[str]:
    """What is known to give such an answer, the simplest first; empty: nothing that is known here.

    A constant factor or offset, or one of the op_type's mutants: an output is recognised when the judge, asked to
    hold it against what the mutant gives, passes it.
    """
    if expected.comparison is None or isinstance(expected.comparison, Samples | IndexSet):
        return []
    found = _affine(actual, expected)
    return [*found, *_known_bugs(subject, output, actual, expected)][:MOST]


def _affine(actual: torch.Tensor, expected: Expected) -> Iterator[str]:
    value = expected.oracle[""]
    a, e = actual.to(torch.float64), value.to(torch.float64)
    usable = torch.isfinite(a) & torch.isfinite(e) & (e != 0)
    if not usable.any():
        return
    ratio = float((a[usable] / e[usable]).median())
    if abs(ratio - 1) > SAME_RATIO and _matches(actual, ratio * e, expected):
        names = [name for name, known in RATIOS.items() if abs(ratio / known - 1) < SAME_RATIO]
        yield f"ratio {ratio:.5g} everywhere" + "".join(f": {name}" for name in names)
        return
    offset = float((a - e)[usable].median())
    if offset and _matches(actual, e + offset, expected):
        yield f"{offset:+.5g} everywhere"


def _known_bugs(subject: Subject, output: str, actual: torch.Tensor, expected: Expected) -> Iterator[str]:
    op = registry.get(subject.definition.op_type)
    if not op.variants or registry.for_definition(subject.definition)[1] is not None:
        return  # the op's mutants are of the forms that it knows
    for mutant in (*op.mutants, *generic_mutants(op.variants[0])):
        made = mutant.make(subject)
        if made is None or output not in made or made[output].shape != actual.shape:
            continue
        if _matches(actual, made[output].to(torch.float64), expected):
            yield f"as with: {mutant.name}"


def _matches(actual: torch.Tensor, wanted: torch.Tensor, expected: Expected) -> bool:
    """Whether an answer would pass if `wanted` were right, with the limits that hold here."""
    value = expected.oracle[""].to(torch.float64)
    moved = {"": wanted}
    if "baseline" in expected.oracle:  # what the baseline loses, lost from there
        moved["baseline"] = wanted + (expected.oracle["baseline"].to(torch.float64) - value).nan_to_num()
    held = replace(expected, oracle={**expected.oracle, **moved})
    return passes(actual, held)
