"""Where implementations disagree: who agrees with whom, and whether a known convention or bug gives this."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import torch

from traceproof.judge.output import Expected, passes, shares_limits
from traceproof.ops import registry
from traceproof.ops.base import Tensors
from traceproof.ops.compare import IndexSet, Samples
from traceproof.ops.formula import Mutant, Variant
from traceproof.ops.op import Subject

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
    return list(islice(chain(found, _known_bugs(subject, output, actual, expected)), MOST))


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
    if registry.for_definition(subject.definition)[1] is not None:
        return  # the op's mutants are of the forms that it knows
    right = RIGHT.make(subject)
    own = ((mutant.name, mutant.make(subject)) for mutant in registry.mutants_of(subject.definition))
    generic = ((one.name, None if right is None else one.change(right)) for one in generic_mutants(RIGHT))
    for name, made in chain(own, generic):
        if made is None or output not in made or made[output].shape != actual.shape:
            continue
        if _matches(actual, made[output].to(torch.float64), expected):
            yield f"as with: {name}"


def _matches(actual: torch.Tensor, wanted: torch.Tensor, expected: Expected) -> bool:
    """Whether an answer would pass if `wanted` were right, with the limits that hold here."""
    value = expected.oracle[""].to(torch.float64)
    moved = {"": wanted}
    if "baseline" in expected.oracle:  # what the baseline loses, lost from there
        moved["baseline"] = wanted + (expected.oracle["baseline"].to(torch.float64) - value).nan_to_num()
    held = replace(expected, oracle={**expected.oracle, **moved})
    return passes(actual, held)


# Mutants of any op: its formula in float32, or another variant, whose outputs are changed.

RIGHT = Variant("float32, rounded once")
Change = Callable[[torch.Tensor], torch.Tensor | None]


class OutputMutant(Mutant):
    """What a variant gives, with `change` made to its outputs; None where that changes nothing."""

    def __init__(self, name: str, variant: Variant, change: Callable[[Tensors], Tensors | None]) -> None:
        super().__init__(name)
        self.variant, self.change = variant, change

    def make(self, subject: Subject) -> Tensors | None:
        """The variant's outputs, changed."""
        outputs = self.variant.make(subject)
        return None if outputs is None else self.change(outputs)


def first_float(change: Change, outputs: Tensors, *, last: bool = False) -> Tensors | None:
    """Change the first floating-point output that the change says something about; `last`: of several the last."""
    if last and len(outputs) < 2:
        return None
    for name, value in reversed(outputs.items()) if last else outputs.items():
        if value.dtype.is_floating_point and value.numel():
            narrow = value.dtype.itemsize == 1  # PyTorch computes nothing with such values
            changed = change(value.float() if narrow else value.clone())
            if changed is not None:
                return outputs | {name: changed.to(value.dtype)}
    return None


def filled(value: torch.Tensor, part: torch.Tensor, number: float) -> torch.Tensor:
    """The tensor, once a number fills a part of it."""
    part.fill_(number)
    return value


def dead_row(value: torch.Tensor) -> torch.Tensor | None:
    """Zeros in the row in the middle."""
    rows = value.view(-1, value.shape[-1]) if value.dim() > 1 else value[:0]
    return filled(value, rows[len(rows) // 2], 0) if len(rows) > 1 else None


def swapped(outputs: Tensors) -> Tensors | None:
    """The first two outputs in each other's place, whatever their shapes."""
    if len(outputs) < 2:
        return None
    first, second = list(outputs)[:2]
    return outputs | {first: outputs[second], second: outputs[first]}


CHANGES: Mapping[str, Change] = {
    "zeros": lambda value: value.zero_(),
    "sign flip": lambda value: -value,
    "scaled by 1.02": lambda value: (value.double() * 1.02).to(value.dtype),
    "one dead row": dead_row,
    "one dead head": lambda value: filled(value, value[:, value.shape[1] // 2], 0) if value.dim() > 2 else None,
    "NaN row": lambda value: filled(value, value.view(-1, value.shape[-1])[0], math.nan),
    "-inf against finite": lambda value: filled(value, value.view(-1)[value.numel() // 2], -math.inf),
    "rows shifted by one": lambda value: value.roll(1, 0) if value.shape[0] > 1 else None,
}
IN_LAST = ("zeros", "scaled by 1.02", "one dead row", "rows shifted by one")  # of a state, a residual, an LSE


def generic_mutants(variant: Variant) -> tuple[OutputMutant, ...]:
    """The mutants of any op, made from an equivalent variant of it."""
    changes = {name: partial(first_float, change) for name, change in CHANGES.items()}
    changes |= {f"last output: {name}": partial(first_float, CHANGES[name], last=True) for name in IN_LAST}
    mutants = [OutputMutant(name, variant, change) for name, change in changes.items()]
    return (*mutants, OutputMutant("swapped outputs", variant, swapped))
