"""Judging one output of a case: presence, shape, dtype, places of NaN and infinities, numbers.

What an op leaves open is filled in before anything is compared: elements that do not count, and places whose
entries may stand in any order (`ops.compare`).

Open rows are those that depend on the order of equal values, which a reference's sort or top-k leaves open. Nobody
says what is right there, so an implementation that is not the reference is not held to rounding in them. An output
with open rows alone is not verified, nor is one with an open row that lies farther from both orders than they lie
apart, as one does that keeps both of two equals.
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

# What a call may not do beside computing: reason and message, by field of the call's result.
MISCONDUCT = {
    "mutated": (Failure.MUTATION, "modified its inputs {}"),
    "aliased": (Failure.ALIAS, "outputs {} share memory with inputs, each other or an earlier call"),
    "subclassed": (Failure.SUBCLASS, "outputs {} are no plain tensors"),
    "overrun": (Failure.OVERRUN, "wrote beside {}, out of bounds"),
    "late": (Failure.LATE, "outputs {} changed after the call's stream was done"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the judge expects of an output."""

    # None for a Python scalar; with trials, a first axis of draws. A size None is left open.
    shape: tuple[int | None, ...] | None
    dtype: torch.dtype | None  # the definition's; None: left open
    # the oracle's entries for this output, by what follows `@` in their names ("": the value); empty: no oracle
    oracle: Mapping[str, torch.Tensor]
    comparison: Comparison | None  # the op's gate; None: no oracle
    drawn: bool = False  # whether the first axis is of random draws, which may be more than `shape` says
    # whether the oracle is computed chunk by chunk while judging; `oracle` is empty then
    in_chunks: bool = False
    lossless: bool = False  # whether every right implementation gives the oracle's value, rounded once


@dataclass(frozen=True, slots=True)
class Ruling:
    """Verdict over one output; `details` are further fields of its row."""

    verdict: Verdict
    reason: str | None
    message: str
    details: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the verdict row."""
        return {"verdict": self.verdict, "reason": self.reason, "message": self.message, **self.details}


def _fail(reason: Failure, message: str, **details: Any) -> Ruling:  # noqa: ANN401 - JSON
    return Ruling(Verdict.FAIL, reason, message, details)


def judge_output(actual: torch.Tensor | None, expected: Expected, *, tolerance: float | None) -> Ruling:
    """Rule on one output; None: it is missing.

    `tolerance`, the user's atol and rtol, replaces the calibrated gate where an output holds rounded floats.
    Shape, dtype, places of NaN and infinities, and what is compared exactly, stay as they are.
    """
    ruling = judge_form(actual, expected)
    if ruling is not None:
        return ruling
    assert actual is not None
    assert expected.comparison is not None
    if isinstance(expected.comparison, Samples | IndexSet):
        gate, details = _discrete(actual, expected.oracle, expected.comparison)
        return _ruling(gate, details)
    if actual.shape != expected.oracle[""].shape:  # an axis whose size only the oracle knows
        wanted = list(expected.oracle[""].shape)
        return _fail(Failure.SHAPE, f"shape is {list(actual.shape)}, the inputs say {wanted}")
    numerics = numerics_of(expected, actual.dtype, tolerance)
    numerics.check_prepared(numerics.measure(with_expected_where_open(actual, expected.oracle), expected.oracle))
    ruling = rule_on(numerics)
    if OPEN not in expected.oracle:
        return ruling
    why = unverified(actual, expected.oracle)
    if ruling.verdict is Verdict.PASS and why:
        return Ruling(Verdict.SKIP, Skip.NO_ORACLE, f"not verified: {why}", {})
    return replace(ruling, message=f"{ruling.message}; {about_open_rows(expected.oracle)}")


def judge_form(actual: torch.Tensor | None, expected: Expected) -> Ruling | None:
    """Rule on presence, shape, dtype, and on there being an oracle; None: the numbers are still to be judged."""
    if actual is None:
        return _fail(Failure.PRESENCE, "the output is missing")
    shape = expected.shape if expected.shape is not None else ()
    if not _has_shape(actual, shape, drawn=expected.drawn):
        return _fail(Failure.SHAPE, f"shape is {list(actual.shape)}, the definition says {list(shape)}")
    if expected.shape is not None and expected.dtype not in {None, actual.dtype}:
        return _fail(Failure.DTYPE, f"dtype is {actual.dtype}, the definition says {expected.dtype}")
    if expected.comparison is None or (not expected.in_chunks and "" not in expected.oracle):
        message = "not verified: no oracle for the numerics; shape and dtype hold"
        return Ruling(Verdict.SKIP, Skip.NO_ORACLE, message, {})
    return None


def _has_shape(actual: torch.Tensor, shape: Sequence[int | None], *, drawn: bool) -> bool:
    """Whether a tensor has a shape, in which None is any size; if `drawn`, it may have more on the first axis."""
    if len(actual.shape) != len(shape):
        return False
    for axis, (size, wanted) in enumerate(zip(actual.shape, shape, strict=True)):
        more = drawn and axis == 0 and wanted is not None and size > wanted
        if not more and wanted not in {None, size}:
            return False
    return True


def numerics_of(
    expected: Expected, dtype: torch.dtype, tolerance: float | None, *, figures: bool = True
) -> Numerics:
    """The Numerics for an output of `dtype`, to be fed chunk by chunk.

    `tolerance`, the user's, decides about floats in place of the gate. `figures` False leaves out metrics, which
    decide nothing.
    """
    comparison = expected.comparison
    assert comparison is not None
    assert not isinstance(comparison, Samples | IndexSet)  # these are judged in one piece, not by numbers
    row = row_for(dtype, quantised=isinstance(comparison, Quantised), tolerance=tolerance)
    decides = tolerance is not None and dtype.is_floating_point and not isinstance(comparison, Exact)
    lossless = expected.lossless and not decides
    return Numerics(comparison, dtype, row, decides=decides, figures=figures, lossless=lossless)


def rule_on(numerics: Numerics) -> Ruling:
    """Ruling by what was measured of all chunks."""
    details = numerics.details()
    misplaced = numerics.misplaced.failure()
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
    """Whether `judge_output` would pass an output of the right shape and dtype; faster, without statistics."""
    if expected.comparison is None or isinstance(expected.comparison, Samples | IndexSet):
        return judge_output(actual, expected, tolerance=None).verdict == Verdict.PASS
    actual = with_expected_where_open(actual, expected.oracle)
    if _misplaced(actual, expected.oracle[""]):
        return False
    return not actual.numel() or gate_of(actual, expected.oracle, expected.comparison).ok


def shares_limits(
    first: torch.Tensor, second: torch.Tensor, oracle: Mapping[str, torch.Tensor], comparison: Numeric
) -> float:
    """Half the difference of two answers over the limit of each; at most 1 for two that pass."""
    first, second = with_expected_where_open(first, oracle), with_expected_where_open(second, oracle)
    if _misplaced(first, second.to(torch.float64)):
        return float("inf")
    if not first.numel():
        return 0.0
    if isinstance(comparison, Exact):
        if "low" in oracle:  # several codes are right
            return max(gate_of(answer, oracle, comparison).margin for answer in (first, second))
        return gate_of(first, {"": second}, comparison).margin
    middle = oracle[""].to(torch.float64) + (first.to(torch.float64) - second.to(torch.float64)) / 2
    return gate_of(middle, oracle, comparison, first.dtype).margin


def _misplaced(actual: torch.Tensor, oracle: torch.Tensor) -> bool:
    misplaced = Misplaced()
    misplaced.add(actual, oracle)
    return misplaced.failure() is not None


def misconduct(**names: Sequence[str]) -> Iterator[Ruling]:
    """A failure per kind of misconduct in MISCONDUCT; `names` has its inputs or outputs."""
    for what, (reason, words) in MISCONDUCT.items():
        if names.get(what):
            yield Ruling(Verdict.FAIL, reason, words.format(list(names[what])), {})


def surplus(name: str) -> Ruling:
    """The failure for an output that the definition does not name."""
    return _fail(Failure.PRESENCE, f"{name} is no output of the definition")


def _discrete(
    actual: torch.Tensor, oracle: Mapping[str, torch.Tensor], comparison: Samples | IndexSet
) -> tuple[Gate, dict[str, Any]]:
    if isinstance(comparison, IndexSet):
        return index_set(actual, oracle, comparison.padding), {}
    tokens, probs, optional = (oracle[name] for name in ("tokens", "probs", "optional"))
    ok, fields = judge_samples(actual, tokens, probs, optional, comparison.false_alarm)
    return Gate("samples", 0.0 if ok else float("inf"), str(fields.pop("detail", ""))), {"metrics": fields}


OTHER_TIES = "other ties"  # entry of an output: its value with equal values sorted in the other order
FREE, GROUPS = "free", "groups"  # entries of an output: see `ops.compare`
OPEN = "open"  # entry of an output: bool mask of open rows, with a last axis of 1
SAME = 2.0**-30  # relative; more than float64 sums in another order differ by, far below float32's rounding


def with_open_places(
    entries: Mapping[str, torch.Tensor], *, reference: bool, nan: bool
) -> dict[str, torch.Tensor]:
    """An output's entries, with OPEN where the shadow with ties in the other order gives other rows.

    Not so of a `reference`, which sorts ties as its shadow does. `nan`: where NaN is expected, FREE.
    """
    if reference:
        return {what: entry for what, entry in entries.items() if what != OTHER_TIES}
    found, value, other = dict(entries), entries.get(""), entries.get(OTHER_TIES)
    if value is not None and nan:
        found[FREE] = value.isnan()
    if value is not None and other is not None and other.shape == value.shape:
        rows = _differing(value, other)
        found |= {OPEN: rows} if rows.any() else {}
    return found


def _differing(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Bool mask [..., 1] of the rows in which two tensors differ by more than float64 rounding."""
    a, b = value.to(torch.float64), other.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    if value.is_floating_point() and value.numel():
        magnitude = a.masked_fill(~a.isfinite(), 0.0).abs()
        same |= (a - b).abs() <= SAME * (magnitude.amax(-1, keepdim=True) if a.dim() else magnitude)
    return ~(same.all(-1, keepdim=True) if same.dim() else same)


def with_expected_where_open(actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The output with the expected values where it is open, except NaN that neither order of ties gives."""
    if actual.shape != entries.get("", actual).shape:
        return actual
    if FREE in entries:
        actual = torch.where(entries[FREE], entries[""].to(actual.dtype), actual)
    if GROUPS in entries:
        actual = sorted_within(actual, entries[GROUPS])
    if OPEN not in entries:
        return actual
    wrong_nan = actual.isnan() & ~(entries[""].isnan() | entries[OTHER_TIES].isnan())
    return torch.where(entries[OPEN] & ~wrong_nan, entries[""].to(actual.dtype), actual)


def sorted_within(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The values, those of each group (int, of their shape) sorted in ascending order among their places."""
    value, group = values.flatten(), groups.flatten()
    order = value.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    return torch.empty_like(value).index_put((group.argsort(stable=True),), value[order]).view_as(values)


def unverified(actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> str:
    """Why an output that passes elsewhere is not verified because of its open rows; empty: it is."""
    if entries[OPEN].all():
        return about_open_rows(entries)
    value, other, output = (tensor.to(torch.float64) for tensor in (entries[""], entries[OTHER_TIES], actual))
    nearest = torch.minimum(_distance(output, value), _distance(output, other))
    far = entries[OPEN] & ~(nearest <= _distance(value, other))
    return f"{about_open_rows(entries)}, {int(far.sum())} of them lie far from what it gives" if far.any() else ""


def _distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Distance of two tensors by row, [..., 1]; equal infinities count as 0 apart."""
    difference = torch.where(first == second, 0.0, first - second)
    return (difference * difference).sum(-1, keepdim=True).sqrt()


def about_open_rows(entries: Mapping[str, torch.Tensor]) -> str:
    """What a verdict's message says of open rows."""
    rows = entries[OPEN]
    return f"{int(rows.sum())} of {rows.numel()} rows follow from how the reference orders equal values"
