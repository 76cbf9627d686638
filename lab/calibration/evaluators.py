"""What published evaluators let pass, by their rules: tolerances and formulas as facts, written here anew.

What is compared with is the float64 oracle in the output's dtype, where they take the reference's own output. For
samplers it is the distribution that flashinfer-bench's mask of tokens leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.answers import Answer
from traceproof.ops.base import Op, Tensors
from traceproof.ops.cases import Case
from traceproof.run.case import SolvedCase

READ = "read in flashinfer-bench 0.1.2"
TEMPLATES = "read in flashinfer-python 0.7.2.post1 (flashinfer.trace)"
LOW_BIT = "moe_fp8_block_scale"  # in a definition's name: what flashinfer-bench tells these by


@dataclass(frozen=True, slots=True)
class Pair:
    """One output of a case in float32: what was given, and what is right."""

    actual: torch.Tensor
    expected: torch.Tensor
    dtype: torch.dtype

    @property
    def error(self) -> torch.Tensor:
        """Absolute differences."""
        return (self.actual - self.expected).abs()


Rule = Callable[[Pair, Definition], bool]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """A published evaluator.

    Attributes:
        rule: whether it lets an output pass; all outputs of all cases must.
        formula: the rule in words.
        known: where its figures come from.
        serves: which definitions it is for.
    """

    rule: Rule
    formula: str
    known: str
    serves: Callable[[Definition], bool] = lambda _: True

    def refuses(self, definition: Definition, outputs: Tensors, right: Tensors) -> bool:
        """Whether any output of a case is refused."""
        return any(
            outputs[name].shape != right[name].shape
            or not self.rule(
                Pair(outputs[name].float(), right[name].to(outputs[name].dtype).float(), outputs[name].dtype),
                definition,
            )
            for name in definition.outputs
            if name in outputs
        )


def both_exceeded(pair: Pair, atol: float, rtol: float) -> torch.Tensor:
    """Where an element is off by more than `atol` and by more than `rtol` of what is right."""
    return (pair.error > atol) & (pair.error / (pair.expected.abs() + 1e-8) > rtol)


def sum_exceeded(pair: Pair, atol: float, rtol: float) -> torch.Tensor:
    """Where an element is off by more than `atol + rtol * |right|`."""
    return ~(pair.error <= atol + rtol * pair.expected.abs()) & ~(pair.actual == pair.expected)


def _bench(pair: Pair, ratio: float, atol: float = 1e-2, rtol: float = 1e-2) -> bool:
    if not torch.isfinite(pair.actual).all():
        return False
    return not pair.actual.numel() or 1 - float(both_exceeded(pair, atol, rtol).float().mean()) >= ratio


def _low_bit(definition: Definition) -> bool:
    return LOW_BIT in definition.name


def _allclose(pair: Pair, tolerance: float) -> bool:
    return torch.allclose(pair.actual, pair.expected, rtol=tolerance, atol=tolerance)


TEMPLATE_TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 1e-1,
    torch.float8_e5m2: 1e-1,
}


def _default_check(pair: Pair, definition: Definition) -> bool:
    """Every element close by its dtype's tolerance, and a cosine of 0.999 over the finite ones."""
    del definition
    tolerance = TEMPLATE_TOLERANCE.get(pair.dtype, 0.0)
    if not pair.actual.numel():
        return True
    if not torch.isclose(pair.actual, pair.expected, rtol=tolerance, atol=tolerance).all():
        return False
    return _cosine(pair) >= 1 - 1e-3 if pair.dtype.is_floating_point else True


def _cosine(pair: Pair) -> float:
    finite = torch.isfinite(pair.actual) & torch.isfinite(pair.expected)
    a, b = pair.actual[finite], pair.expected[finite]
    if not len(a):
        return 1.0
    size = a.norm() * b.norm()
    return float(a @ b / size) if float(size) else float(torch.equal(a, b))


def _sol(pair: Pair, definition: Definition) -> bool:
    del definition
    if torch.isnan(pair.actual).any() or torch.isinf(pair.actual).any():
        return False
    return not pair.actual.numel() or float((~sum_exceeded(pair, 1e-2, 1e-2)).float().mean()) >= 0.99


EVALUATORS: Mapping[str, Evaluator] = {
    "flashinfer-bench default": Evaluator(
        lambda pair, _: _bench(pair, 1.0),
        "no element is off by more than 1e-2 and more than 1e-2 of the right value; none infinite or NaN",
        READ,
    ),
    "flashinfer-bench low bit": Evaluator(
        lambda pair, _: _bench(pair, 0.95),
        "the same for 95 % of the elements; for names with `moe_fp8_block_scale`",
        READ,
        _low_bit,
    ),
    "contest MoE": Evaluator(
        lambda pair, _: _bench(pair, 0.9, 1.0, 0.3),
        "the same for 90 % of the elements, with 1 and 0.3",
        "a survey of the contest's settings; its source could not be reached",
        lambda definition: definition.op_type == "moe",
    ),
    "SOL-ExecBench": Evaluator(
        _sol,
        "99 % of the elements within 1e-2 and 1e-2 of the right value together; none infinite or NaN",
        "fields and 99 % from a survey of arXiv 2603.19173; 1e-2 assumed, its source could not be reached",
    ),
    "KernelBench": Evaluator(
        lambda pair, _: _allclose(pair, 1e-2),
        "all elements within 1e-2 and 1e-2 of the right value together",
        "assumed; its source could not be reached",
    ),
    "FlashInfer default check": Evaluator(
        _default_check,
        "as KernelBench with 1e-5, 1e-3, 1e-2 for float32, float16, bfloat16; cosine of 0.999",
        TEMPLATES,
    ),
    "FlashInfer norm check": Evaluator(
        lambda pair, _: _allclose(pair, 1e-3),
        "as KernelBench with 1e-3",
        TEMPLATES,
        lambda definition: {"hidden_states", "weight"} <= definition.inputs.keys(),
    ),
    "FlashInfer gemm check": Evaluator(
        lambda pair, _: not pair.actual.numel() or _cosine(pair) >= 0.99,
        "cosine of 0.99 over the finite elements",
        TEMPLATES,
        lambda definition: {"A", "B"} <= definition.inputs.keys(),
    ),
}


SAMPLING = "flashinfer-bench sampling"
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


def drawn(answer: Answer, subjects: Iterable[SolvedCase]) -> Drawn | None:
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


def valid(subject: SolvedCase) -> torch.Tensor:
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
