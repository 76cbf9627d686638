"""Whether two sides that a law makes equal are so: in every bit, within rounding, or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import torch

from traceproof.judge import gates
from traceproof.judge.output import Expected, judge_output
from traceproof.ops.answers import Subject
from traceproof.ops.base import Tensors
from traceproof.ops.compare import Comparison, IndexSet, Quantised, Samples
from traceproof.reasons import Verdict
from traceproof.run.tensor_files import same_values

# References of experts compute in float32 from the stored values: two of their answers differ by an order of sums
# and one rounding of the output. The op's own limits are for kernels that requantise.
SAME_EXPERTS = Quantised(rms=0.005, slope=0.005, reason="an order of float32 sums, and bfloat16 outputs")
FALSE_ALARM = 1e-6  # of two samples from one distribution being taken for two


class Agreement(StrEnum):
    """How two sides agree."""

    BITWISE = "bitwise"
    ROUNDING = "within rounding"
    NONE = "broken"


def agree(
    subject: Subject, name: str, left: torch.Tensor, right: torch.Tensor, room: torch.Tensor | None
) -> tuple[Agreement, str]:
    """How one output's two sides agree, and what to tell people.

    Args:
        subject: the case.
        name: the output.
        left: one side.
        right: the other.
        room: what a low-precision computation loses on both sides, absolute and elementwise; None where the
            comparison needs none.
    """
    if same_values(left, right):
        return Agreement.BITWISE, ""
    comparison = subject.op.comparisons(subject.definition)[name]
    if isinstance(comparison, Samples):
        return _same_distribution(left, right)
    if isinstance(comparison, IndexSet):
        return _same_sets(subject, name, left, right)
    expected = Expected(
        shape=tuple(right.shape),
        dtype=right.dtype,
        oracle=_expected(right, room),
        comparison=_comparison(comparison),
    )
    ruling = judge_output(left, expected, tolerance=None)
    return Agreement.ROUNDING if ruling.verdict == Verdict.PASS else Agreement.NONE, ruling.message


def _comparison(comparison: Comparison) -> Comparison:
    return SAME_EXPERTS if isinstance(comparison, Quantised) else comparison


def _expected(right: torch.Tensor, room: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
    """The right side in the oracle's place; what both sides may lose, in the floor's or the bound's."""
    value = right.to(torch.float64)
    return {"": value} if room is None else {"": value, "floor": value + room, "bound": room}


def room_for(sides: list[tuple[Tensors, Tensors]], name: str) -> torch.Tensor | None:
    """What the floor loses against the oracle, |left| + |right|, the experiment done with each of the two."""
    (low_left, low_right), (exact_left, exact_right) = sides
    if name not in low_left or name not in exact_left:
        return None
    pairs = ((low_left, exact_left), (low_right, exact_right))
    lost = [(low[name].double() - exact[name].double()).abs() for low, exact in pairs]
    return torch.nan_to_num(lost[0]) + torch.nan_to_num(lost[1])


def _same_sets(subject: Subject, name: str, left: torch.Tensor, right: torch.Tensor) -> tuple[Agreement, str]:
    """Rows of indices as sets; where they differ, both must be choices that rounding leaves open."""
    if left.shape == right.shape and torch.equal(left.sort(-1).values, right.sort(-1).values):
        return Agreement.BITWISE, "as sets"
    entries = {key.partition("@")[2]: value for key, value in subject.oracle.items()}
    padding = subject.op.comparisons(subject.definition)[name]
    assert isinstance(padding, IndexSet)
    if left.shape == right.shape and len(left) == len(entries["scores"]):
        found = [gates.index_set(side, entries, padding.padding) for side in (left, right)]
        if all(gate.ok for gate in found):
            return Agreement.ROUNDING, "sets differ among scores within rounding of the k-th best"
    return Agreement.NONE, "sets of indices differ"


def _same_distribution(left: torch.Tensor, right: torch.Tensor) -> tuple[Agreement, str]:
    """Two samples [trials, rows]: every token's frequency within what chance allows (Hoeffding, union bound)."""
    if left.shape != right.shape:
        return Agreement.NONE, f"shapes {list(left.shape)} and {list(right.shape)}"
    trials, rows = left.shape
    worst, tokens = 0.0, 0
    for row in range(rows):
        seen = torch.unique(torch.cat([left[:, row], right[:, row]]))
        tokens += len(seen)
        counts = [(side[:, row, None] == seen).sum(0) for side in (left, right)]
        worst = max(worst, float((counts[0] - counts[1]).abs().max()) / trials)
    limit = math.sqrt(2 * math.log(4 * max(tokens, 1) / FALSE_ALARM) / (2 * trials)) * math.sqrt(2)
    text = f"frequencies differ by up to {worst:.3g} in {trials} trials (limit {limit:.3g})"
    return Agreement.ROUNDING if worst <= limit else Agreement.NONE, text
