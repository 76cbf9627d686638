"""Judging one output of a case: presence, shape, dtype, NaN and infinities by position, numerics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from traceproof.judge import gates
from traceproof.judge.gates import Gate
from traceproof.judge.metrics import all_finite, metrics
from traceproof.judge.sampling import judge_samples
from traceproof.judge.specification import row_for
from traceproof.ops.compare import Backward, Close, Comparison, Exact, IndexSet, Quantised, Samples
from traceproof.reasons import Failure, Skip, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the judge expects of an output.

    Attributes:
        shape: None for a Python scalar; a leading axis of trials counts.
        dtype: the definition's.
        oracle: the oracle's entries for this output, by what follows `@` ("" is the value); empty: no oracle.
        comparison: the op's gate; None: no oracle.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    oracle: Mapping[str, torch.Tensor]
    comparison: Comparison | None


@dataclass(frozen=True, slots=True)
class Ruling:
    """Verdict over one output."""

    verdict: Verdict
    reason: str | None
    message: str
    details: Mapping[str, Any]


def _fail(reason: Failure, message: str, **details: Any) -> Ruling:  # noqa: ANN401 - JSON
    return Ruling(Verdict.FAIL, reason, message, details)


def judge_output(actual: torch.Tensor | None, expected: Expected, *, tolerance: float | None) -> Ruling:
    """Rule on one output; `tolerance` overrides the atol and rtol of the specification's row (reported only)."""
    if actual is None:
        return _fail(Failure.PRESENCE, "the output is missing")
    shape = expected.shape if expected.shape is not None else ()
    if tuple(actual.shape) != shape:
        return _fail(Failure.SHAPE, f"shape is {list(actual.shape)}, the definition says {list(shape)}")
    if expected.shape is not None and actual.dtype != expected.dtype:
        return _fail(Failure.DTYPE, f"dtype is {actual.dtype}, the definition says {expected.dtype}")
    if expected.comparison is None or "" not in expected.oracle:
        return Ruling(Verdict.SKIP, Skip.NO_ORACLE, "shape and dtype hold; no oracle for the numerics", {})
    return _numerics(actual, expected, expected.comparison, tolerance)


def _numerics(actual: torch.Tensor, expected: Expected, comparison: Comparison, tolerance: float | None) -> Ruling:
    if isinstance(comparison, Samples | IndexSet):
        gate, details = _discrete(actual, expected.oracle, comparison)
        return _ruling(gate, details)
    value = expected.oracle[""]
    misplaced = _misplaced(actual, value)
    row = row_for(actual.dtype, quantised=isinstance(comparison, Quantised), tolerance=tolerance)
    details = {
        "metrics": metrics(actual.to(torch.float64), value.to(torch.float64), row),
        "specification": {"atol": row.atol, "rtol": row.rtol, "hit_ratio": row.hit_ratio},
    }
    details["worst"] = details["metrics"].pop("worst")
    if misplaced is not None:
        reason, message = misplaced
        return _fail(reason, message, **details)
    if not actual.numel():
        return Ruling(Verdict.PASS, None, "empty, as it should be", details)
    return _ruling(_gate(actual, expected.oracle, comparison, actual.dtype), details)


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
    if _misplaced(actual, expected.oracle[""]) is not None:
        return False
    return not actual.numel() or _gate(actual, expected.oracle, expected.comparison, actual.dtype).ok


def shares_limits(
    one: torch.Tensor, other: torch.Tensor, oracle: Mapping[str, torch.Tensor], comparison: Comparison
) -> float:
    """Half the difference of two answers as a part of the limit on each, so two that pass are never above 1."""
    if _misplaced(one, other.to(torch.float64)) is not None:
        return float("inf")
    if not one.numel():
        return 0.0
    value = oracle[""].to(torch.float64)
    if isinstance(comparison, Exact):
        return gates.exact(one, other, comparison).margin
    middle = value + (one.to(torch.float64) - other.to(torch.float64)) / 2
    return _gate(middle, oracle, comparison, one.dtype).margin


def _gate(
    actual: torch.Tensor, oracle: Mapping[str, torch.Tensor], comparison: Comparison, dtype: torch.dtype
) -> Gate:
    value = oracle[""]
    match comparison:
        case Close():
            return gates.close(actual, value, oracle["floor"], comparison, dtype)
        case Backward():
            return gates.backward(actual, value, oracle["bound"], comparison, dtype)
        case Quantised():
            return gates.quantised(actual, value, oracle.get("roundings"), comparison, dtype)
        case Exact():
            return gates.exact(actual, value, comparison)
        case _:
            raise TypeError(f"no gate for {type(comparison).__name__}")


def _discrete(
    actual: torch.Tensor, oracle: Mapping[str, torch.Tensor], comparison: Samples | IndexSet
) -> tuple[Gate, dict[str, Any]]:
    if isinstance(comparison, IndexSet):
        return gates.index_set(actual, oracle, comparison.padding), {}
    ok, fields = judge_samples(
        actual, oracle["tokens"], oracle["probs"], oracle["optional"], comparison.false_alarm
    )
    return Gate("samples", 0.0 if ok else float("inf"), str(fields.pop("detail", ""))), {"metrics": fields}


def _misplaced(actual: torch.Tensor, oracle: torch.Tensor) -> tuple[Failure, str] | None:
    """NaN and infinities must stand where the oracle has them; an overflow of the dtype may saturate or not."""
    if not actual.dtype.is_floating_point:
        return None
    if all_finite(actual) and all_finite(oracle):
        return None
    x, e = actual.to(torch.float64), oracle.to(torch.float64)
    nan = torch.isnan(x) != torch.isnan(e)
    if nan.any():
        first = nan.nonzero()[0].tolist()
        count = f"{int(nan.sum())} of {nan.numel()}"
        return Failure.NAN, f"{count} elements are NaN on one side only, first at {first}"
    overflow = e.abs() > torch.finfo(actual.dtype).max
    infinite = (
        (torch.isinf(x) | torch.isinf(e)) & (x != e) & ~(overflow & torch.isfinite(e) & (x.sign() == e.sign()))
    )
    if infinite.any():
        where = infinite.nonzero()[0].tolist()
        count = f"{int(infinite.sum())} of {infinite.numel()}"
        return Failure.INFINITY, f"{count} elements are infinite on one side only, first at {where}"
    return None
