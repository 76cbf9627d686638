"""Judging one output of a case: presence, shape, dtype, NaN and infinities by position, numerics.

What an op leaves open is filled in before anything is compared: places that count for nothing, and places whose
entries may stand in any order (`ops.compare`).

Last: rows that the order of equal values decides, which a reference's sort or top-k leaves open. Another right
implementation takes other equals, or all of them: nothing says what is right there. So in such rows another one's
answer is not held to rounding. An output of which all rows are open is not verified, nor is one with an open row
that lies farther from both orders than they lie apart: one that keeps all of two equals does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from traceproof.judge.gates import Gate, gate_of, index_set
from traceproof.judge.metrics import row_for
from traceproof.judge.numerics import Misplaced, Numeric, Numerics
from traceproof.judge.sampling import judge_samples
from traceproof.ops.compare import Comparison, Exact, IndexSet, Quantised, Samples
from traceproof.reasons import Failure, Skip, Verdict

# What a call may not do beside computing.
MISCONDUCT = {
    "mutated": (Failure.MUTATION, "modified its inputs {}"),
    "aliased": (Failure.ALIAS, "outputs {} share memory with others"),
    "subclassed": (Failure.SUBCLASS, "outputs {} are no plain tensors"),
    "overrun": (Failure.OVERRUN, "wrote beside {}, out of bounds"),
    "late": (Failure.LATE, "outputs {} changed after the call's stream was done"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the judge expects of an output."""

    # None for a Python scalar; a leading axis of trials counts. None in it: a size that is left open.
    shape: tuple[int | None, ...] | None
    dtype: torch.dtype | None  # the definition's; None: it leaves it open
    # the oracle's entries for this output, by what follows `@` ("" is the value); empty: no oracle
    oracle: Mapping[str, torch.Tensor]
    comparison: Comparison | None  # the op's gate; None: no oracle
    drawn: bool = False  # whether the first axis is of draws, which may be more than `shape` says
    # whether the oracle's entries are computed chunk by chunk while judging; `oracle` is empty then
    in_chunks: bool = False
    lossless: bool = False  # whether every right way gives the oracle's value, rounded once


@dataclass(frozen=True, slots=True)
class Ruling:
    """Verdict over one output."""

    verdict: Verdict
    reason: str | None
    message: str
    details: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """What a verdict row says of it."""
        return {"verdict": self.verdict, "reason": self.reason, "message": self.message, **self.details}


def _fail(reason: Failure, message: str, **details: Any) -> Ruling:  # noqa: ANN401 - JSON
    return Ruling(Verdict.FAIL, reason, message, details)


def judge_output(actual: torch.Tensor | None, expected: Expected, *, tolerance: float | None) -> Ruling:
    """Rule on one output.

    A `tolerance` is the user's: atol and rtol that replace the calibrated gate where an output holds rounded
    floats. Shape, dtype, the places of NaN and infinities, and what is compared exactly, stay as they are.
    """
    ruling = judge_form(actual, expected)
    if ruling is not None:
        return ruling
    assert actual is not None
    assert expected.comparison is not None
    if isinstance(expected.comparison, Samples | IndexSet):
        gate, details = _discrete(actual, expected.oracle, expected.comparison)
        return _ruling(gate, details)
    if actual.shape != expected.oracle[""].shape:  # of an axis whose size no input says
        wanted = list(expected.oracle[""].shape)
        return _fail(Failure.SHAPE, f"shape is {list(actual.shape)}, the inputs say {wanted}")
    numerics = numerics_of(expected, actual.dtype, tolerance)
    numerics.hold_prepared(numerics.measure(closed(actual, expected.oracle), expected.oracle))
    ruling = rule_on(numerics)
    if OPEN not in expected.oracle:
        return ruling
    why = unverified(actual, expected.oracle)
    if ruling.verdict is Verdict.PASS and why:
        return Ruling(Verdict.SKIP, Skip.NO_ORACLE, f"not verified: {why}", {})
    return replace(ruling, message=f"{ruling.message}; {told(expected.oracle)}")


def judge_form(actual: torch.Tensor | None, expected: Expected) -> Ruling | None:
    """Rule on presence, shape and dtype, and on there being an oracle; None: only the numbers are left."""
    if actual is None:
        return _fail(Failure.PRESENCE, "the output is missing")
    shape = expected.shape if expected.shape is not None else ()
    fits = len(actual.shape) == len(shape) and all(
        wanted in {None, size} or (expected.drawn and not axis and wanted is not None and size > wanted)
        for axis, (size, wanted) in enumerate(zip(actual.shape, shape, strict=True))
    )
    if not fits:
        return _fail(Failure.SHAPE, f"shape is {list(actual.shape)}, the definition says {list(shape)}")
    if expected.shape is not None and expected.dtype not in {None, actual.dtype}:
        return _fail(Failure.DTYPE, f"dtype is {actual.dtype}, the definition says {expected.dtype}")
    if expected.comparison is None or (not expected.in_chunks and "" not in expected.oracle):
        message = "not verified: no oracle for the numerics; shape and dtype hold"
        return Ruling(Verdict.SKIP, Skip.NO_ORACLE, message, {})
    return None


def numerics_of(
    expected: Expected, dtype: torch.dtype, tolerance: float | None, *, figures: bool = True
) -> Numerics:
    """What measures an output of `dtype`, chunk by chunk.

    A caller's tolerance decides about floats in place of the gates. Without `figures`, metrics that decide nothing
    are left out.
    """
    comparison = expected.comparison
    assert comparison is not None
    assert not isinstance(comparison, Samples | IndexSet)  # which are judged in one piece, and not by numbers
    row = row_for(dtype, quantised=isinstance(comparison, Quantised), tolerance=tolerance)
    decides = tolerance is not None and dtype.is_floating_point and not isinstance(comparison, Exact)
    lossless = expected.lossless and not decides
    return Numerics(comparison, dtype, row, decides=decides, figures=figures, lossless=lossless)


def rule_on(numerics: Numerics) -> Ruling:
    """Rule on what was measured of all chunks."""
    details = numerics.details()
    misplaced = numerics.misplaced()
    if misplaced is not None:
        return _fail(*misplaced, **details)
    gate = numerics.gate()
    if gate is None:
        return Ruling(Verdict.PASS, None, "empty, as it should be", details)
    return _ruling(gate, details)


def _ruling(gate: Gate, details: Mapping[str, Any]) -> Ruling:
    margin = gate.margin if gate.margin != float("inf") else None
    details = {**details, "gate": {"kind": gate.kind, "margin": margin}}
    if gate.ok:
        return Ruling(Verdict.PASS, None, gate.detail, details)
    return _fail(Failure.NUMERICS, gate.detail, **details)


def passes(actual: torch.Tensor, expected: Expected) -> bool:
    """Whether `judge_output` would pass an output of the right shape and dtype; without its figures."""
    if expected.comparison is None or isinstance(expected.comparison, Samples | IndexSet):
        return judge_output(actual, expected, tolerance=None).verdict == Verdict.PASS
    actual = closed(actual, expected.oracle)
    if _misplaced(actual, expected.oracle[""]):
        return False
    return not actual.numel() or gate_of(actual, expected.oracle, expected.comparison).ok


def shares_limits(
    one: torch.Tensor, other: torch.Tensor, oracle: Mapping[str, torch.Tensor], comparison: Numeric
) -> float:
    """Half the difference of two answers as a part of the limit on each, so two that pass are never above 1."""
    one, other = closed(one, oracle), closed(other, oracle)
    if _misplaced(one, other.to(torch.float64)):
        return float("inf")
    if not one.numel():
        return 0.0
    if isinstance(comparison, Exact):
        if "low" in oracle:  # more than one answer is right
            return max(gate_of(answer, oracle, comparison).margin for answer in (one, other))
        return gate_of(one, {"": other}, comparison).margin
    middle = oracle[""].to(torch.float64) + (one.to(torch.float64) - other.to(torch.float64)) / 2
    return gate_of(middle, oracle, comparison, one.dtype).margin


def _misplaced(actual: torch.Tensor, oracle: torch.Tensor) -> bool:
    found = Misplaced()
    found.add(actual, oracle)
    return found.failure() is not None


def misconduct(**names: Sequence[str]) -> Iterator[Ruling]:
    """Failures for what a call did beside computing: of each key of `MISCONDUCT`, the inputs or outputs."""
    for what, (reason, words) in MISCONDUCT.items():
        if names.get(what):
            yield Ruling(Verdict.FAIL, reason, words.format(list(names[what])), {})


def surplus(name: str) -> Ruling:
    """Rule on an output that the definition does not name."""
    return _fail(Failure.PRESENCE, f"{name} is no output of the definition")


def _discrete(
    actual: torch.Tensor, oracle: Mapping[str, torch.Tensor], comparison: Samples | IndexSet
) -> tuple[Gate, dict[str, Any]]:
    if isinstance(comparison, IndexSet):
        return index_set(actual, oracle, comparison.padding), {}
    tokens, probs, optional = (oracle[name] for name in ("tokens", "probs", "optional"))
    ok, fields = judge_samples(actual, tokens, probs, optional, comparison.false_alarm)
    return Gate("samples", 0.0 if ok else float("inf"), str(fields.pop("detail", ""))), {"metrics": fields}


OTHER_TIES = "other ties"  # entry of an output: what it is with equal values in another order
FREE, GROUPS = "free", "groups"  # entries of an output: see `ops.compare`
OPEN = "open"  # entry of an output: which rows are open, bool, 1 in place of its last axis
SAME = 2.0**-30  # relative: what the order of a sum leaves in float64, and more; far below float32's rounding


def with_open_rows(entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An output's entries, and which rows are open, where the shadow in another order of equals shows some."""
    other = entries.get(OTHER_TIES)
    if other is None or "" not in entries or other.shape != entries[""].shape:
        return dict(entries)
    rows = _differing(entries[""], other)
    return {**entries, OPEN: rows} if rows.any() else dict(entries)


def _differing(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The rows in which two tensors differ by more than rounding."""
    one, two = (each.to(torch.float64) for each in (value, other))
    same = (one == two) | (one.isnan() & two.isnan())
    if value.is_floating_point() and value.numel():
        finite = one.masked_fill(~one.isfinite(), 0.0).abs()
        same |= (one - two).abs() <= SAME * (finite.amax(-1, keepdim=True) if finite.dim() else finite)
    return ~(same.all(-1, keepdim=True) if same.dim() else same)


def closed(actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """An output that holds what is expected where it is open, but for NaN that neither order of equals gives."""
    if actual.shape != entries.get("", actual).shape:
        return actual
    if FREE in entries:
        actual = torch.where(entries[FREE], entries[""].to(actual.dtype), actual)
    if GROUPS in entries:
        actual = sorted_within(actual, entries[GROUPS])
    left = entries.get(OPEN)
    if left is None:
        return actual
    nowhere = actual.isnan() & ~(entries[""].isnan() | entries[OTHER_TIES].isnan())
    return torch.where(left & ~nowhere, entries[""].to(actual.dtype), actual)


def sorted_within(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The values, those in places of one group in ascending order."""
    value, group = values.flatten(), groups.flatten()
    order = value.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    return torch.empty_like(value).index_put((group.argsort(stable=True),), value[order]).view_as(values)


def unverified(actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> str:
    """Why an output that is right elsewhere is not verified for its open rows; empty: it is."""
    left = entries[OPEN]
    if left.all():
        return told(entries)
    value, other, given = (one.to(torch.float64) for one in (entries[""], entries[OTHER_TIES], actual))
    distance = torch.minimum(_apart(given, value), _apart(given, other))
    far = left & ~(distance <= _apart(value, other))
    return f"{told(entries)}, {int(far.sum())} of them lie far from what it gives" if far.any() else ""


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far two tensors lie apart, row by row; not at all where both are the same infinity."""
    difference = torch.where(one == other, 0.0, one - other)
    return (difference * difference).sum(-1, keepdim=True).sqrt()


def told(entries: Mapping[str, torch.Tensor]) -> str:
    """What a verdict says of open rows."""
    left = entries[OPEN]
    return f"{int(left.sum())} of {left.numel()} rows follow from how the reference orders equal values"
