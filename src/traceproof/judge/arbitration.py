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
SAME_RATIO = 1e-3  # relative; a bfloat16 output of many elements shows its constant factor more exactly than this
MOST = 3  # explanations given; where more fit, the case does not tell them apart


def agree(first: torch.Tensor | None, second: torch.Tensor | None, expected: Expected) -> float | None:
    """Half the distance of two answers over the limit that the judge allows each of them; at most 1: they agree.

    None where nothing can be said: an output is absent, there is no oracle to take the limit from, or the
    comparison is of sets or random draws.
    """
    if first is None or second is None or "" not in expected.oracle:
        return None
    if expected.comparison is None or isinstance(expected.comparison, Samples | IndexSet):
        return None
    if first.shape != second.shape or first.dtype != second.dtype or first.shape != expected.oracle[""].shape:
        return math.inf
    return shares_limits(first, second, expected.oracle, expected.comparison)


def explain(subject: Subject, output: str, actual: torch.Tensor, expected: Expected) -> list[str]:
    """Known bugs or conventions that give such an answer, the simplest first, at most MOST; empty: none is known.

    A constant factor or offset, or one of the op_type's mutants: it is recognised when the judge, with the
    mutant's output in place of the oracle's, passes the answer.
    """
    if expected.comparison is None or isinstance(expected.comparison, Samples | IndexSet):
        return []
    factors = _affine(actual, expected)
    return list(islice(chain(factors, _known_bugs(subject, output, actual, expected)), MOST))


def _affine(actual: torch.Tensor, expected: Expected) -> Iterator[str]:
    """A constant ratio or offset between an answer and the expected one, in words."""
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
    """Names of known bugs (mutants) that would give this answer."""
    if registry.for_definition(subject.definition)[1] is not None:
        return  # mutants exist only for forms that the op knows
    right = RIGHT.make(subject)
    of_op = ((mutant.name, mutant.make(subject)) for mutant in registry.mutants_of(subject.definition))
    of_any = ((mutant.name, mutant.change(right)) for mutant in generic_mutants(RIGHT)) if right else ()
    for name, outputs in chain(of_op, of_any):
        if outputs is None or output not in outputs or outputs[output].shape != actual.shape:
            continue
        if _matches(actual, outputs[output].to(torch.float64), expected):
            yield f"as with: {name}"


def _matches(actual: torch.Tensor, wanted: torch.Tensor, expected: Expected) -> bool:
    """Whether an answer would pass if `wanted`, float64 of its shape, were right, with the limits of this case."""
    oracle = {**expected.oracle, "": wanted}
    if "baseline" in oracle:  # the baseline's error, around `wanted`
        error = oracle["baseline"].to(torch.float64) - expected.oracle[""].to(torch.float64)
        oracle["baseline"] = wanted + error.nan_to_num()
    return passes(actual, replace(expected, oracle=oracle))


# Mutants of any op: outputs of its formula in float32, or of another variant, changed.

RIGHT = Variant("float32, rounded once")
Change = Callable[[torch.Tensor], torch.Tensor | None]


class OutputMutant(Mutant):
    """A variant's outputs with `change` made to them; None where the change does not apply."""

    def __init__(self, name: str, variant: Variant, change: Callable[[Tensors], Tensors | None]) -> None:
        super().__init__(name)
        self.variant, self.change = variant, change

    def make(self, subject: Subject) -> Tensors | None:
        """The variant's outputs, changed."""
        outputs = self.variant.make(subject)
        return None if outputs is None else self.change(outputs)


def change_one(change: Change, outputs: Tensors, *, last: bool = False) -> Tensors | None:
    """Outputs with the first floating-point one that `change` applies to changed; `last`: of several, the last."""
    if last and len(outputs) < 2:
        return None
    for name, value in reversed(outputs.items()) if last else outputs.items():
        if value.dtype.is_floating_point and value.numel():
            narrow = value.dtype.itemsize == 1  # PyTorch has no arithmetic for 8-bit floats
            changed = change(value.float() if narrow else value.clone())
            if changed is not None:
                return outputs | {name: changed.to(value.dtype)}
    return None


def filled(value: torch.Tensor, part: torch.Tensor, number: float) -> torch.Tensor:
    """Fill `part`, a view of `value`, with a number; returns `value`."""
    part.fill_(number)
    return value


def dead_row(value: torch.Tensor) -> torch.Tensor | None:
    """Zeros in the middle row of all rows; None where there is one row alone."""
    rows = value.view(-1, value.shape[-1]) if value.dim() > 1 else value[:0]
    return filled(value, rows[len(rows) // 2], 0) if len(rows) > 1 else None


def swapped(outputs: Tensors) -> Tensors | None:
    """The first two outputs exchanged, whatever their shapes."""
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
# the last output often is a state, a residual or an LSE
IN_LAST = ("zeros", "scaled by 1.02", "one dead row", "rows shifted by one")


def generic_mutants(variant: Variant) -> tuple[OutputMutant, ...]:
    """The mutants that any op has, made by changing the outputs of `variant`."""
    changes = {name: partial(change_one, change) for name, change in CHANGES.items()}
    changes |= {f"last output: {name}": partial(change_one, CHANGES[name], last=True) for name in IN_LAST}
    mutants = [OutputMutant(name, variant, change) for name, change in changes.items()]
    return (*mutants, OutputMutant("swapped outputs", variant, swapped))
