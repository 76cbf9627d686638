"""The judge rejects every wrong answer that it can be handed and accepts rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch

from traceproof.judge import gates
from traceproof.judge.gates import gate_of, numeric_gate
from traceproof.judge.metrics import Figures, Row
from traceproof.judge.numerics import Numeric
from traceproof.judge.octaves import OCTAVES
from traceproof.judge.output import Expected, Ruling, judge_output, numerics_of, rule_on
from traceproof.ops.compare import Backward, Close, Comparison, Exact, IndexSet, Quantised
from traceproof.reasons import Failure, Skip, Verdict

SHAPE = (6, 4, 32)


def oracle_value() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def noisy(value: torch.Tensor, seed: int) -> torch.Tensor:
    """As a kernel gives it: float32 noise, then one rounding to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return (value + 1e-4 * torch.randn(value.shape, generator=generator)).to(torch.bfloat16)


def rule(actual: torch.Tensor | None, comparison: Comparison | None = None) -> Ruling:
    value = oracle_value()
    entries = {"": value, "baseline": noisy(value, 2), "bound": torch.full(SHAPE, 1e-3, dtype=torch.float64)}
    expected = Expected(shape=SHAPE, dtype=torch.bfloat16, oracle=entries, comparison=comparison or Close())
    return judge_output(actual, expected, tolerance=None)


@pytest.mark.parametrize("seed", range(32))
@pytest.mark.parametrize("comparison", [Close(), Backward(), Quantised()], ids=lambda kind: type(kind).__name__)
def test_rounding_passes(seed: int, comparison: Comparison) -> None:
    ruling = rule(noisy(oracle_value(), 100 + seed), comparison)
    assert ruling.verdict == Verdict.PASS, ruling.message


def one_row(value: torch.Tensor, factor: float) -> torch.Tensor:
    value[2, 3] *= factor
    return value


def one_element(value: torch.Tensor) -> torch.Tensor:
    value[5, 1, 7] += 0.1
    return value


def nan_row(value: torch.Tensor) -> torch.Tensor:
    value[1] = float("nan")
    return value


def infinite(value: torch.Tensor) -> torch.Tensor:
    value[0, 0, 0] = float("-inf")
    return value


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Failure]] = {
    "zeros": (torch.zeros_like, Failure.NUMERICS),
    "sign flip": (torch.neg, Failure.NUMERICS),
    "1.05 x": (lambda value: value * 1.05, Failure.NUMERICS),
    "1.02 x": (lambda value: value * 1.02, Failure.NUMERICS),
    "rows swapped": (lambda value: value.flip(0), Failure.NUMERICS),
    "dead head": (lambda value: one_row(value, 0.0), Failure.NUMERICS),
    "NaN row": (nan_row, Failure.NAN),
    "-inf against finite": (infinite, Failure.INFINITY),
    "another shape": (lambda value: value.reshape(6, 128), Failure.SHAPE),
    "transposed": (lambda value: value.transpose(0, 1), Failure.SHAPE),
    "empty": (lambda value: value[:0], Failure.SHAPE),
    "another dtype": (lambda value: value.to(torch.float16), Failure.DTYPE),
}


@pytest.mark.parametrize("comparison", [Close(), Quantised()], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_fail(name: str, comparison: Comparison) -> None:
    change, reason = WRONG[name]
    ruling = rule(change(noisy(oracle_value(), 3)), comparison)
    assert (ruling.verdict, ruling.reason) == (Verdict.FAIL, reason)


def test_one_wrong_element_fails_the_floor_gate() -> None:
    ruling = rule(one_element(noisy(oracle_value(), 3)))
    assert ruling.reason == Failure.NUMERICS
    assert ruling.details["worst"][0]["index"] == [5, 1, 7]


def test_an_element_that_the_floor_hits_may_be_rounded_twice_and_once_more() -> None:
    expected = torch.full((4, 64), 1.0, dtype=torch.float64)
    expected[:, 0] = 8.0
    baseline = expected + 0.006
    baseline[:, 0] = 8.0  # hit by luck, where rounding once may lose 8 * 2**-8
    for roundings, ok in ((2.0, True), (2.9, True), (3.1, False)):
        actual = expected.clone()
        actual[1, 0] += roundings * gates.unit_roundoff(torch.bfloat16) * 8.0
        gate = gate_of(actual, {"": expected, "baseline": baseline}, Close(), torch.bfloat16)
        assert gate.ok == ok, gate.detail


@pytest.mark.parametrize(("spacings", "ok"), [(0.92, True), (1.5, True), (1.7, False)])
def test_a_row_decided_by_one_element_may_lose_what_one_rounding_can(spacings: float, *, ok: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    expected = 0.02 * torch.randn((5, 96), generator=generator, dtype=torch.float64)
    expected[:, 32] = 14.6934  # between 8 and 16 bfloat16 has steps of 1/16
    baseline = expected.to(torch.bfloat16)  # off by 0.09 of a step there, and so in every row
    actual = baseline.to(torch.float64)
    actual[:, 32] = expected[:, 32] + spacings / 16
    gate = gate_of(actual, {"": expected, "baseline": baseline}, Close(), torch.bfloat16)
    assert gate.ok == ok, gate.detail
    assert gate.detail.startswith("row RMS"), "a single element may lose 2.8 steps"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_row_of_thousands_of_alike_elements_keeps_its_baseline_within_3_per_cent(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    value = 1 + torch.rand((3, 4096), generator=generator, dtype=torch.float64)
    realised = (value.to(dtype).to(torch.float64) - value).square().mean(-1).sqrt()
    assert ((gates.rounding_rms(value, dtype) / realised - 1).abs() <= 0.03).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_one_rounding_of_one_element_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    steps = {
        "normal": torch.finfo(dtype).eps,
        "least": torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps,
    }
    for value, step in ((1.0 + 0.3 * steps["normal"], steps["normal"]), (0.3 * steps["least"], steps["least"])):
        row = torch.tensor(
            [[-value, 0.0, 1.0, steps["least"]]], dtype=torch.float64
        )  # the others are held exactly
        assert gates.rounding_rms(row, dtype).item() == pytest.approx(step / 2 / row.numel() ** 0.5, rel=1e-12)


def test_luck_allows_nothing_where_nothing_is_rounded() -> None:
    value = torch.arange(1.0, 97.0, dtype=torch.float64).repeat(5, 1)
    for held in (value, torch.zeros_like(value)):
        assert not gates.rounding_rms(held, torch.bfloat16).any()
    assert not gates.rounding_rms(value + 0.3, torch.int8).any()
    actual = value * (1 + torch.finfo(torch.bfloat16).eps)
    assert not gate_of(actual, {"": value, "baseline": value}, Close(), torch.bfloat16).ok


def test_luck_leaves_rows_with_nan_and_infinities_to_their_finite_elements() -> None:
    value = torch.full((2, 96), 1e-3, dtype=torch.float64)
    value[:, 32], value[0, 0], value[1, 1] = 14.6934, float("nan"), float("-inf")
    actual = value.clone()
    actual[:, 32] += 0.92 / 16
    for spread, ok in ((1.0, True), (2.0, False)):
        off = value + spread * (actual - value).nan_to_num()
        gate = gate_of(off, {"": value, "baseline": value.to(torch.bfloat16)}, Close(), torch.bfloat16)
        assert gate.ok == ok, gate.detail


def test_a_missing_output_fails_and_without_an_oracle_shape_and_dtype_are_judged() -> None:
    assert rule(None).reason == Failure.PRESENCE
    expected = Expected(shape=(2,), dtype=torch.float32, oracle={}, comparison=None)
    good = judge_output(torch.ones(2), expected, tolerance=None)
    assert (good.verdict, good.reason) == (Verdict.SKIP, Skip.NO_ORACLE)
    assert judge_output(torch.ones(3), expected, tolerance=None).reason == Failure.SHAPE
    expected = replace(expected, shape=(None,), oracle={"": torch.ones(2).double()}, comparison=Exact())
    assert judge_output(torch.ones(0), expected, tolerance=None).reason == Failure.SHAPE


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ([3, 1, 2, 9, 7], Verdict.PASS),
        ([1, 3, 2, 9, -7], Verdict.PASS),
        ([1, 1, 2, 9, 7], Verdict.FAIL),
        ([1, 9, 2, 3, 7], Verdict.FAIL),
    ],
)
def test_what_an_op_leaves_open_is_not_compared(given: list[int], verdict: Verdict) -> None:
    places = [False, False, False, False, True]
    value, groups = torch.tensor([1, 2, 3, 9, 0]), torch.tensor([0, 0, 0, 1, 2])
    entries = {"": value, "groups": groups, "free": torch.tensor(places)}
    expected = Expected(shape=(5,), dtype=torch.int64, oracle=entries, comparison=Exact())
    assert judge_output(torch.tensor(given), expected, tolerance=None).verdict == verdict


@pytest.mark.parametrize("value", [torch.zeros(0, 4).double(), torch.tensor([1.0, -torch.inf]).double()])
def test_an_empty_output_and_minus_infinity_where_the_oracle_has_it_pass(value: torch.Tensor) -> None:
    entries = {"": value, "baseline": value.float()}
    expected = Expected(shape=tuple(value.shape), dtype=torch.float32, oracle=entries, comparison=Close())
    assert judge_output(value.float(), expected, tolerance=None).verdict == Verdict.PASS


@pytest.mark.parametrize("kind", [Close(), Quantised(), Backward()], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize(
    ("tolerance", "verdict"),
    [(None, Verdict.FAIL), (0.1, Verdict.PASS), (1e-3, Verdict.FAIL), (0.0, Verdict.FAIL)],
)
def test_a_users_tolerance(kind: Close | Quantised | Backward, tolerance: float | None, verdict: Verdict) -> None:
    value = oracle_value()
    entries = {"": value, "baseline": value.to(torch.bfloat16), "bound": torch.full_like(value, 1e-6)}
    expected = Expected(shape=SHAPE, dtype=torch.bfloat16, oracle=entries, comparison=kind)
    wrong = (value * 1.03).to(torch.bfloat16)
    ruling = judge_output(wrong, expected, tolerance=tolerance)
    assert ruling.verdict == verdict
    assert ruling.details.get("tolerance") == tolerance
    assert ("your tolerance" in ruling.message) == (tolerance is not None)
    assert (ruling.details["gate"]["kind"] == "tolerance") == (tolerance is not None)


def test_a_tolerance_of_zero_accepts_equal_bits_alone() -> None:
    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    entries = {"": value, "baseline": value.float()}
    expected = Expected(shape=(2,), dtype=torch.float32, oracle=entries, comparison=Close())
    assert judge_output(value.float(), expected, tolerance=0.0).verdict == Verdict.PASS
    assert judge_output(value.float() * (1 + 2**-22), expected, tolerance=0.0).verdict == Verdict.FAIL


def test_what_is_exact_and_where_nan_stands_no_tolerance_changes() -> None:
    indices = torch.arange(6)
    expected = Expected(shape=(6,), dtype=torch.int64, oracle={"": indices}, comparison=Exact())
    ruling = judge_output(indices + (indices == 3), expected, tolerance=10.0)
    assert ruling.verdict == Verdict.FAIL
    assert "tolerance" not in ruling.details
    value = oracle_value()
    entries = {"": value, "baseline": value.bfloat16()}
    floats = Expected(shape=SHAPE, dtype=torch.bfloat16, oracle=entries, comparison=Close())
    broken = value.bfloat16()
    broken[0, 0] = float("nan")
    assert judge_output(broken, floats, tolerance=10.0).reason == Failure.NAN


CHOSEN = {
    "as the oracle": ([4, 2, 0], True),
    "in another order": ([0, 4, 2], True),
    "a tie taken the other way": ([4, 2, 1], True),
    "a worse one": ([4, 2, 3], False),
    "one twice": ([4, 4, 2], False),
    "one missing": ([4, 2, -1], False),
    "no candidate": ([4, 2, 9], False),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_index_sets(name: str) -> None:
    chosen, good = CHOSEN[name]
    extras = {
        "scores": torch.tensor([[1.0, 1.0, 2.0, 0.5, 3.0, float("-inf")]], dtype=torch.float64),
        "candidates": torch.tensor([[0, 1, 2, 3, 4, -1]]),
        "tolerance": torch.tensor([1e-6], dtype=torch.float64),
    }
    gate = gates.index_set(torch.tensor([chosen], dtype=torch.int32), extras, IndexSet().padding)
    assert gate.ok is good


def test_the_histogram_counts_each_element_by_its_share_of_what_is_allowed() -> None:
    figures = Figures(Row(1.0, 0.0))
    low, high = OCTAVES
    shares = torch.tensor([0.0, 2.0**-40, 0.5, 0.75, 1.5, 1e30], dtype=torch.float64)
    figures.add(shares, torch.zeros(6, dtype=torch.float64))
    counts = figures.summary()["histogram"]
    by_octave = {low + place: count for place, count in enumerate(counts) if count}
    assert by_octave == {low: 2, 0: 2, 1: 1, high: 1}


KINDS: dict[str, Comparison] = {
    "close": Close(),
    "close-rms": Close(rms=0.005),
    "close-matrix": Close(row_axes=2),
    "backward": Backward(),
    "quantised": Quantised(),
    "exact": Exact(),
}
ANSWERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rounding": lambda value: noisy(value, 3),
    "1.02 x": lambda value: (value * 1.02).to(torch.bfloat16),
    "one element": lambda value: one_element(value.clone()).to(torch.bfloat16),
    "NaN row": lambda value: nan_row(value.clone()).to(torch.bfloat16),
    "infinite": lambda value: infinite(value.clone()).to(torch.bfloat16),
    "the oracle, rounded": lambda value: value.to(torch.bfloat16),
}


def chunked(actual: torch.Tensor, entries: dict[str, torch.Tensor], kind: Comparison, rows: int) -> Ruling:
    """As the judge of large cases feeds it: `rows` rows at a time."""
    expected = Expected(shape=SHAPE, dtype=actual.dtype, oracle=entries, comparison=kind)
    numerics = numerics_of(expected, actual.dtype, None)
    parts = [slice(start, start + rows) for start in range(0, len(actual), rows)]
    for part in parts:
        prepared = numerics.measure(actual[part], {k: v[part] for k, v in entries.items()}, part.start)
        if not numerics.two_passes:
            numerics.hold_prepared(prepared)
    for part in parts if numerics.two_passes else ():
        numerics.hold(actual[part], {k: v[part] for k, v in entries.items()}, part.start)
    return rule_on(numerics)


def distances(ruling: Ruling) -> list[str]:
    return [str(abs(float(place["actual"]) - float(place["expected"]))) for place in ruling.details["worst"]]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4])
def test_chunks_are_judged_as_the_whole_is(kind: str, answer: str, rows: int) -> None:
    value = oracle_value()
    actual = ANSWERS[answer](value)
    entries = {"": value, "baseline": noisy(value, 2), "bound": torch.full(SHAPE, 1e-3, dtype=torch.float64)}
    if kind == "exact":
        entries = {"": value.to(torch.bfloat16)}
    whole = judge_output(
        actual, Expected(shape=SHAPE, dtype=actual.dtype, oracle=entries, comparison=KINDS[kind]), tolerance=None
    )
    parts = chunked(actual, entries, KINDS[kind], rows)
    assert (parts.verdict, parts.reason) == (whole.verdict, whole.reason)
    assert parts.message == whole.message
    assert distances(parts) == distances(whole)  # of places that are equally wrong any may be named
    for name, figure in whole.details["metrics"].items():
        assert parts.details["metrics"][name] == pytest.approx(figure, rel=1e-12), name


def edge_of(kind: Comparison, entries: dict[str, torch.Tensor], outwards: float) -> torch.Tensor:
    """An answer whose margin is `outwards`: the oracle and a multiple of one rounding error."""
    value = entries[""]
    error = noisy(value, 5).double() - value

    def margin(scale: float) -> float:
        return gate_of(value + scale * error, entries, cast("Numeric", kind), torch.bfloat16).margin

    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if margin(middle) < outwards else (low, middle)
    return value + low * error


@pytest.mark.parametrize("kind", ["close", "close-rms", "close-matrix", "backward", "quantised"])
@pytest.mark.parametrize("outwards", [0.999, 1.001])
def test_chunks_fall_on_the_same_side_of_a_gate(kind: str, outwards: float) -> None:
    value = oracle_value()
    entries = {"": value, "baseline": noisy(value, 2).double(), "bound": torch.full(SHAPE, 1e-3).double()}
    actual = edge_of(KINDS[kind], entries, outwards)
    gate = numeric_gate(cast("Numeric", KINDS[kind]), torch.bfloat16)
    parts = [{k: v[row : row + 1] for k, v in entries.items()} for row in range(len(actual))]
    for row, part in enumerate(parts):
        gate.pool(gate.prepare(actual[row : row + 1], part))
    for row, part in enumerate(parts):
        gate.hold(gate.prepare(actual[row : row + 1], part))
    assert gate.gate().margin == pytest.approx(outwards, rel=1e-6)
    assert gate.gate().ok == (outwards < 1)


@pytest.mark.parametrize(("exact", "verdict"), [(65503.0, "pass"), (65000.0, "fail"), (60000.0, "fail")])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("comparison", [Close(), Backward(), Quantised(rms=1e-4)], ids=repr)
def test_an_infinity_is_an_error_like_any_other_where_rounding_may_overflow(
    comparison: Comparison, sign: float, exact: float, verdict: Verdict
) -> None:
    value = torch.full((4, 8), 64000.0, dtype=torch.float64)
    value[1, 2] = sign * exact
    actual = value.to(torch.float16)
    actual[1, 2] = sign * float("inf")
    bound = torch.full_like(value, 8.0)
    entries = {"": value, "baseline": value + 30.0, "bound": bound}
    expected = Expected(shape=(4, 8), dtype=torch.float16, oracle=entries, comparison=comparison)
    assert judge_output(actual, expected, tolerance=None).verdict == verdict
