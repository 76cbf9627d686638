"""How an output is compared: declared by the op, carried out by the judge.

Every kind is judged against the float64 oracle. The op also returns a `baseline`: the same
output computed naively at the precision the kernel works in. The baseline's error is what that precision costs, so
an implementation may err about that much and not more.

For an output `name` judged by its values, the op's oracle may also return `name@free`, bool in the output's shape
or with 1 in place of axes, true where any value is right, NaN too; and `name@groups`, integers in its shape:
values in places of equal groups may be in any order. The oracle's own values ascend there.

Where several answers are right, outputs must fit together: an output that follows another one (`Op.follows`) is
compared with those of its right values that fit what the implementation gave for the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Limits for references of quantised ops, in addition to one rounding of the output. Experts in float32 reach 0.2
# of them, with bfloat16 intermediates 0.9; output times 1.01 or 0.99 exceeds them in every case with work in it.
REFERENCE_RMS = 0.006
REFERENCE_SLOPE = 0.004
LOSSLESS_SLOPE = 2.0**-10  # a quarter of bfloat16's rounding; truncating the output gives 0.7 of a rounding
ANY_CODE = 1 << 14  # beyond all codes in their order
ANY_NUMBER = 1 << 12  # beyond all numbers in it, and at or before NaN
Entries = Mapping[str, "torch.Tensor"]  # the oracle's for one output, by what follows `@` ("": the value)
# (what an implementation gave for another output, the entries for that, an output's own) -> the own that fit it
Fitting = Callable[["torch.Tensor", Entries, Entries], Entries]


@dataclass(frozen=True, slots=True)
class Close:
    """Floating point values: error against the oracle, at most `factor` times the baseline's."""

    # how many times the baseline's error an implementation may have; 2 unless the op gives a reason
    factor: float = 2.0
    # how many last axes make a row, over which errors are averaged. 2 where the error of a matrix is of rank one,
    # so that its rows hold one rounding each and average nothing.
    row_axes: int = 1
    # the factor for a definition's reference, where kernels have a reason to lose more; None: the same
    reference_factor: float | None = None
    # why these numbers, in one sentence
    reason: str = "twice the error of a naive computation at the kernel's precision"


@dataclass(frozen=True, slots=True)
class Backward:
    """A matrix product: |C - C64| <= limit * eps * (|A| @ |B|.T) elementwise, plus the output's rounding.

    The op's oracle returns, beside output `name`, an entry `name + "@bound"`: float64, the same shape, the value
    of sqrt(K) * eps_accumulate * (|A| @ |B|.T).
    """

    limit: float = 4.0
    reason: str = "LAPACK's scaled residual: independent of the magnitudes of A and B"


@dataclass(frozen=True, slots=True)
class IndexSet:
    """Rows of indices judged as sets, padded with `padding`; ties at the boundary may go either way.

    The op's oracle returns, beside output `name`, an entry `name + "@scores"`: float64 [rows, candidates], the
    score of every candidate (-inf: not a candidate), and `name + "@tolerance"`: float64 [rows], how far a chosen
    score may lie below the boundary through rounding. Candidate c stands for index `name + "@candidates"`[row, c]
    (int64, -1: none).
    """

    padding: int = -1
    reason: str = "a chosen index must score within rounding of the k-th best"


@dataclass(frozen=True, slots=True)
class Samples:
    """Random draws: exact support and a frequency test.

    The implementation's output has a leading axis of trials: int64 [trials, rows], or [trials, rows, length] where
    a draw is a sequence, as each of the tokens below is then. The op's oracle returns, beside output
    `name` (any one valid draw), each row's exact distribution in sparse form, n being the largest support:
    `name + "@tokens"`: int64 [rows, n], the tokens that may be drawn, most probable first, padded with -1;
    `name + "@probs"`: float64 [rows, n], their probabilities if all of them take part, padded with 0;
    `name + "@optional"`: bool [rows, n], tokens that may be left out (ties at the boundary, or a boundary within
    float32 rounding of p).
    """

    false_alarm: float = 1e-6  # probability that a right sampler fails one output of one case
    reason: str = "frequency tests with proven tails, at most one false alarm in a million outputs"


@dataclass(frozen=True, slots=True)
class Quantised:
    """Outputs of fp8 and fp4 kernels: relative RMS error, cosine and slope against the oracle, hit ratio reported.

    The op's oracle may return, beside output `name`, an entry `name + "@roundings"`: float64 [1], the number
    of equal roundings inside the kernel that the slope averages. With few, it varies by chance: see `judge.gates`.
    """

    # limit of RMS(error) / RMS(oracle) per row, where activations are requantised inside the kernel
    rms: float = 0.1
    # limit of |<x, oracle> / <oracle, oracle> - 1| over the output, beyond what roundings tilt by chance; catches
    # a wrong scale
    slope: float = 0.02
    reason: str = (
        "requantising the activations to fp8 costs a few per cent of RMS; zeros cost 100, a sign flip 200"
    )
    exact: bool = True  # whether requantising inside kernels is exact for lossless inputs


@dataclass(frozen=True, slots=True)
class Exact:
    """Bits must agree (copies, integer results); codes of a narrow format may be any from a correct rounding.

    For codes, `order` turns the output into int16 in the order of the codes' values (`formats.Format.order`).
    The op's oracle returns, beside output `name`, the least and the greatest correct ones, as `name + "@low"`
    and `name + "@high"`, with one more last axis: ranges, of which one must hold.
    """

    reason: str = "no arithmetic takes place"
    order: "Callable[[torch.Tensor], torch.Tensor] | None" = None


Comparison = Close | Backward | IndexSet | Samples | Quantised | Exact


def of_reference(kind: Comparison) -> Comparison:
    """The comparison for a definition's reference, made from that for kernels.

    A reference of a quantised op computes with the values that the codes stand for and requantises nothing, so it
    may not lose what a kernel may lose by that. The limits leave room for 16-bit intermediates.
    """
    if isinstance(kind, Close) and kind.reference_factor is not None:
        return replace(
            kind, factor=kind.reference_factor, reason="references compute in float32, with exact functions"
        )
    if not isinstance(kind, Quantised):
        return kind
    rms, slope = min(kind.rms, REFERENCE_RMS), min(kind.slope, REFERENCE_SLOPE)
    return replace(kind, rms=rms, slope=slope, reason="references compute in float32 and requantise nothing")


def of_lossless(kind: Quantised) -> Quantised:
    """The comparison for kernels on a GPU whose requantising loses nothing, although their sums may."""
    rms, slope = min(kind.rms, REFERENCE_RMS), min(kind.slope, LOSSLESS_SLOPE)
    return replace(kind, rms=rms, slope=slope, reason="what is requantised keeps its value, sums may have 16 bits")
