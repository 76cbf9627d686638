"""The precision that a kernel really computed in, read off the fine structure of its errors.

Three things leave different traces. Rounded inputs give the exact answer to other inputs, so the float64 oracle on
rounded inputs predicts the output. A rounded result is the number of a coarser format nearest to the exact answer.
Rounded sums are numbers of that format too, but not the nearest: with all but four terms of each sum at zero, each
takes few roundings, whatever the order of summation. Half precision and TF32 have the same digits; values beyond
half precision's range tell them apart.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import torch

from traceproof.judge.gates import unit_roundoff

TF32 = "tf32"
# Formats narrower than float32, the coarsest first: digits behind the binary point, largest value.
FORMATS: Mapping[str, tuple[int, float]] = {
    "float8_e5m2": (2, 57344.0),
    "float8_e4m3fn": (3, 448.0),
    "bfloat16": (7, 3.38e38),
    "float16": (10, 65504.0),
    TF32: (10, 3.4e38),
}
# Added to float32 bits before the lower 13 are cut off: tensor cores add nothing (CUT), `cvt.rna.tf32` rounds
# halves away from zero (AWAY); EVEN stands for nearest even.
EVEN, AWAY, CUT = -1, 0x1000, 0
ASKED = "as asked"
OTHER = "errors that no rounding explains"
COARSE = 5.5  # binary digits; sums in bfloat16 keep 6 and more
EXPLAINED = 0.5  # share of the error that rounding the inputs must leave at most
NEAREST = 0.06  # share of results that are not the nearest number of the format, where only the result was rounded
UP = 2.0**17  # a factor that takes inputs beyond half precision's range
KEPT = 4  # terms of a sum that are not set to zero
BETWEEN = 8.15  # digits measured of sums in bfloat16 (6.6 to 7.8) and in half precision (8.5 and more)
MANY = 1000  # results that are enough for a verdict
PROBES = 8
LEAST = 64  # fewer elements say nothing

Compute = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Seen:
    """The precision found: `stage` is `inputs`, `sums` or `result`; or ASKED or OTHER, with an empty `format`."""

    stage: str
    format: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.stage} rounded to {self.format}" if self.format else self.stage


def rounded(value: torch.Tensor, name: str, half: int = EVEN) -> torch.Tensor:
    """A tensor rounded to a format, in its own dtype; 8-bit formats saturate; `half` is for TF32 alone."""
    _, largest = FORMATS[name]
    if name == TF32:
        bits = value.to(torch.float32).contiguous().view(torch.int32)
        carry = 0xFFF + ((bits >> 13) & 1) if half == EVEN else half
        kept = ((bits + carry) & ~0x1FFF).view(torch.float32).to(value.dtype)
        return torch.where(torch.isfinite(value), kept, value)
    saturated = value.clamp(-largest, largest) if name.startswith("float8") else value
    return saturated.to(getattr(torch, name)).to(value.dtype)


def examine(
    inputs: Mapping[str, torch.Tensor], summed: tuple[str, ...], observe: Compute, exact: Compute
) -> Seen | None:
    """Which precision a kernel used for one output; None: it can not be told.

    `inputs` are the floating-point ones wider than eight bits, `summed` those whose last axis it sums over.
    `observe` gives the kernel's output for such inputs, `exact` the float64 oracle's.
    """
    actual, right = observe(inputs), exact(inputs)
    if actual.shape != right.shape or actual.numel() < LEAST or not actual.dtype.is_floating_point:
        return None
    if not bool(torch.isfinite(actual).all()):
        return None
    seen = _rounded_inputs(inputs, actual, right, exact)
    if seen is None and summed:
        seen = _by_digits(*_sparse(inputs, summed, observe, exact))
    error = _error(actual, right)
    seen = seen or Seen(ASKED, "", f"relative error {error:.3g}" if math.isfinite(error) else "nothing to measure")
    if seen.format in {TF32, "float16"} and summed:
        return _half_or_tf32(seen, inputs, summed, observe)
    return seen


def _sparse(
    inputs: Mapping[str, torch.Tensor], summed: tuple[str, ...], observe: Compute, exact: Compute
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results that are not zero, and the right ones, of as many thinned inputs as it takes."""
    results: list[torch.Tensor] = []
    right_ones: list[torch.Tensor] = []
    for seed in range(PROBES):
        sparse = thinned(inputs, summed, seed)
        right = exact(sparse)
        results.append(observe(sparse)[right != 0])
        right_ones.append(right[right != 0])
        if sum(map(len, right_ones)) >= MANY:
            break
    return torch.cat(results), torch.cat(right_ones)


def thinned(inputs: Mapping[str, torch.Tensor], summed: tuple[str, ...], seed: int) -> dict[str, torch.Tensor]:
    """The inputs' absolute values, so that nothing cancels; `summed` ones with KEPT elements per row, else 0."""
    changed = {name: value.abs() for name, value in inputs.items()}
    for name in summed:
        value = changed[name]
        noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed))
        places = noise.topk(min(KEPT, value.shape[-1]), dim=-1).indices
        changed[name] = torch.zeros_like(value).scatter(-1, places, value.gather(-1, places))
    return changed


def _rounded_inputs(
    inputs: Mapping[str, torch.Tensor], actual: torch.Tensor, right: torch.Tensor, exact: Compute
) -> Seen | None:
    """The rounding of inputs that explains the errors, if one does."""
    before = _error(actual, right), _share_not_nearest(actual, right)
    best, least, after_best = "", EXPLAINED, before
    groups = [tuple(inputs), *(((name,) for name in inputs) if len(inputs) > 1 else ())]
    ways = [(name, EVEN) for name in FORMATS] + [(TF32, AWAY), (TF32, CUT)]
    for (name, half), group in product(ways, groups):
        changed = {key: rounded(value, name, half) if key in group else value for key, value in inputs.items()}
        if all(torch.equal(changed[key], inputs[key]) for key in group):
            continue
        predicted = exact(changed)
        after = _error(actual, predicted), _share_not_nearest(actual, predicted)
        # where there was no error, a rounding that changes nothing would explain it
        shares = (now / was for now, was in zip(after, before, strict=True) if 0 < was < math.inf)
        share = min(shares, default=1.0)
        if share < least and bool(predicted.any()):  # zeros show that inputs were lost, not how they were rounded
            best, least, after_best = name, share, after
    if not best:
        return None
    error = f"error {before[0]:.3g} against the oracle, {after_best[0]:.3g} once inputs are rounded"
    return Seen("inputs", best, f"{error}; {before[1]:.1%} and {after_best[1]:.1%} of results are not the nearest")


def _share_not_nearest(actual: torch.Tensor, right: torch.Tensor) -> float:
    """Share of results that are not the number of their dtype nearest to the right answer."""
    return float((actual != right.to(actual.dtype)).double().mean())


def _error(actual: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the error over the norm of the right answer; inf where that is 0."""
    apart = actual.double() - right.double()
    return float(apart.norm() / right.double().norm().clamp_min(1e-300)) if bool(right.any()) else math.inf


def _by_digits(actual: torch.Tensor, right: torch.Tensor) -> Seen | None:
    """By the coarsest format that holds all results: "result" where they are its nearest, else "sums"; or None."""
    results, right = actual.double(), right.double()
    if results.numel() < LEAST:
        return None
    off = _share_not_nearest(actual, right)
    for name, (digits, _) in FORMATS.items():
        narrower = 2.0 ** -(digits + 1) > unit_roundoff(actual.dtype)
        if narrower and torch.equal(_to_digits(results, digits), results):
            far = float((_to_digits(right, digits) != results).double().mean())
            stage = "result" if far <= NEAREST else "sums"
            return Seen(stage, name, f"all results have {digits} binary digits, {far:.1%} are not the nearest")
    before = _digits_before(results, right, actual.dtype, off)
    if before is None or before > 16:
        return None
    evidence = f"errors as of {before:.1f} binary digits where few terms are summed"
    if before < COARSE:
        return Seen(OTHER, "", evidence)
    return Seen("sums", "bfloat16" if before < BETWEEN else TF32, evidence)


def _digits_before(actual: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, off: float) -> float | None:
    """Binary digits of the computation before the output's rounding to `dtype`; None: as many as that shows.

    `actual` and `right` are float64; `off` is the share of results that are not the nearest.
    """
    of_output = -math.log2(2 * unit_roundoff(dtype))
    error = float(((actual - right).abs() / 2.0 ** torch.floor(torch.log2(right.abs()))).median())
    if error * 4 > 1.6 * 2.0**-of_output:
        return -math.log2(4 * error)
    return None if off < 2.0**-9 else of_output - math.log2(4 * off)


def _to_digits(value: torch.Tensor, digits: int) -> torch.Tensor:
    """Values rounded to `digits` binary digits after the mantissa's point, without limits of range."""
    mantissa, exponent = torch.frexp(value)
    scale = 2.0 ** (digits + 1)
    return torch.ldexp(torch.round(mantissa * scale) / scale, exponent)


def _half_or_tf32(
    seen: Seen, inputs: Mapping[str, torch.Tensor], summed: tuple[str, ...], observe: Compute
) -> Seen:
    """Half precision or TF32, by whether the kernel still computes beyond half precision's range."""
    first = inputs[summed[0]]
    if first.dtype == torch.float16:
        return Seen(seen.stage, "float16 or tf32", seen.evidence)
    large = {name: value * UP if name in summed else value for name, value in inputs.items()}
    here, there = observe(inputs).double(), observe(large).double()
    lost = not bool(torch.isfinite(there).all()) or float(there.abs().median()) < 0.01 * float(here.abs().median())
    holds = "does not hold" if lost else "holds"
    return Seen(seen.stage, "float16" if lost else TF32, f"{seen.evidence}; {holds} for inputs times 2^17")
