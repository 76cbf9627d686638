"""The judge rejects wrong answers and accepts rounding; it names bugs, minorities and the strength of proofs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from definitions import GOOD, rmsnorm, write
from dialect_samples import GATED
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline import Run, summarise, told, typed
from pipeline import row as row_of

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.digests import digest_json
from traceproof.judge import gates
from traceproof.judge.arbitration import agree, explain
from traceproof.judge.gates import gate_of, numeric_gate
from traceproof.judge.metrics import Figures, Row
from traceproof.judge.numerics import Numeric
from traceproof.judge.octaves import OCTAVES
from traceproof.judge.output import Expected, Ruling, judge_output, numerics_of, rule_on
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.ops.compare import Backward, Close, Comparison, Exact, IndexSet, Quantised
from traceproof.publish.verified import ImplementationVerdict, verification
from traceproof.reasons import Failure, Grade, Skip, Verdict
from traceproof.run.case import SolvedCase, fingerprints, make_inputs, solve
from traceproof.run.job import graded
from traceproof.run.known import Known
from traceproof.run.report import table
from traceproof.sandbox import Limits

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
        numerics.measure(actual[part], {k: v[part] for k, v in entries.items()}, part.start)
    for part in parts:
        numerics.check(actual[part], {k: v[part] for k, v in entries.items()}, part.start)
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


@pytest.mark.parametrize("kind", ["close", "close-matrix", "backward", "quantised"])
@pytest.mark.parametrize("outwards", [0.999, 1.001])
def test_chunks_fall_on_the_same_side_of_a_gate(kind: str, outwards: float) -> None:
    value = oracle_value()
    entries = {"": value, "baseline": noisy(value, 2).double(), "bound": torch.full(SHAPE, 1e-3).double()}
    actual = edge_of(KINDS[kind], entries, outwards)
    gate = numeric_gate(cast("Numeric", KINDS[kind]), torch.bfloat16)
    parts = [{k: v[row : row + 1] for k, v in entries.items()} for row in range(len(actual))]
    for row, part in enumerate(parts):
        gate.add(gate.prepare(actual[row : row + 1], part))
    for row, part in enumerate(parts):
        if gate.due(row):
            gate.check(gate.prepare(actual[row : row + 1], part))
    assert gate.result().margin == pytest.approx(outwards, rel=1e-6)
    assert gate.result().ok == (outwards < 1)


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


LIMITS = Limits(seconds=300.0, memory_bytes=2 << 30)
OWN = Path(__file__).parent / "dataset" / "definitions"
MLA, SSU = "mla_ragged/mla_ragged_prefill_causal_h16_qk192_vo128", "mamba_ssu/mamba_ssu_decode_h6_d32_s16_ng1"


def subject(path: str, case_id: str = "small-1") -> SolvedCase:
    definition = Definition.model_validate_json((OWN / f"{path}.json").read_text(encoding="utf-8"))
    found = registry.get(definition.op_type).of_form(definition).cases(definition, sizes=("small",), seed=0)
    return solve(definition, next(case for case in found if case.id == case_id))


def test_a_logarithm_of_the_other_base_is_recognised() -> None:
    about = subject(MLA)
    expected = about.expected("lse")
    natural = (expected.oracle[""] * math.log(2)).to(expected.dtype)
    [told, *_] = explain(about, "lse", natural, expected)
    assert told == "ratio 0.69315 everywhere: the natural logarithm where base 2 is meant"


@pytest.mark.parametrize("path", [MLA, "rmsnorm/rmsnorm_h96", "rope/rope_cos_sin_cache_d32", SSU])
def test_most_bugs_of_the_calibration_are_recognised_by_name(path: str) -> None:
    about = subject(path)
    missed, seen = [], 0
    known = registry.get(about.definition.op_type)
    for answer in known.mutants:
        made = answer.make(about)
        for output in about.definition.outputs if made is not None else ():
            assert made is not None
            expected = about.expected(output)
            if judge_output(made[output], expected, tolerance=None).verdict != Verdict.FAIL:
                continue
            seen += 1
            told = explain(about, output, made[output], expected)
            if f"as with: {answer.name}" not in told and not any(text.startswith("ratio") for text in told):
                missed.append((answer.name, output, told))
    assert seen
    assert len(missed) * 4 <= seen, missed  # several bugs may give one answer, and only a few are named


def test_a_right_answer_that_only_rounds_badly_is_not_given_a_name() -> None:
    about = subject("rmsnorm/rmsnorm_h96")
    expected = about.expected("output")
    noise = 1 + 0.05 * torch.sin(torch.arange(expected.oracle[""].numel())).view_as(expected.oracle[""])
    assert explain(about, "output", (expected.oracle[""] * noise).to(expected.dtype), expected) == []


@settings(max_examples=60)
@given(
    kind=st.sampled_from([Close(), Backward(), Quantised()]),
    one=st.floats(-1.5, 1.5),
    other=st.floats(-1.5, 1.5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_two_answers_that_pass_agree(kind: Comparison, one: float, other: float, dtype: torch.dtype) -> None:
    value = torch.linspace(0.5, 2, 64, dtype=torch.float64).view(4, 16)
    step = torch.cos(torch.arange(64, dtype=torch.float64)).view(4, 16)
    oracle = {"": value, "baseline": (value + 0.004 * step).to(dtype), "bound": (0.002 * step).abs() + 1e-4}
    expected = Expected(shape=(4, 16), dtype=dtype, oracle=oracle, comparison=kind)
    answers = [(value + 0.01 * size * step).to(dtype) for size in (one, other)]
    apart = agree(answers[0], answers[1], expected)
    assert apart is not None
    if all(judge_output(answer, expected, tolerance=None).verdict == Verdict.PASS for answer in answers):
        assert apart <= 1
    assert agree(answers[0], answers[0], expected) == 0


def test_an_outvoted_reference_is_named_and_leaves_a_replay(tmp_path: Path) -> None:
    wrong = GOOD.replace("EPS = 1e-6", "EPS = 1e-6 * 100000")
    write(tmp_path / "dataset", rmsnorm("alpha"))
    write(tmp_path / "dataset", rmsnorm("beta", wrong.replace("+ EPS", "+ 10 * EPS").replace("* 100000", "")))
    run = Run(tmp_path / "dataset", tmp_path / "results", limits=LIMITS)
    rows = run.verify("torch")
    failing = [row for row in rows["beta"] if row["verdict"] == "fail" and row["implementation"] == "reference"]
    voted = [row for row in failing if not row["case"].startswith("hidden")]  # those are the reference's alone
    assert voted
    for row in voted:
        assert row["arbitration"]["outvoted"] == ["reference"]
        assert "reference against oracle, torch: reference in the minority" in row["message"]
    assert any(row["arbitration"]["recognised"] for row in voted)
    bundle = run.out / voted[0]["replay"]
    replay = json.loads((bundle / "replay.json").read_text(encoding="utf-8"))
    definition, case = Definition.model_validate(replay["definition"]), Case(**replay["case"])
    inputs = make_inputs(registry.get("rmsnorm"), definition, case, device=torch.device("cpu"))
    assert digest_json(fingerprints(inputs)) == voted[0]["digests"]["inputs"]
    assert replay["repeat"] == voted[0]["repeat"]
    assert not list((run.out / "replay" / "rmsnorm").glob("alpha*"))


def row(name: str, implementation: str, against: str, verdict: str = "pass", **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    of = {"definition": name, "op_type": name.partition("_")[0], "output": "y"}
    return row_of(**of, implementation=implementation, against=against, verdict=verdict) | more


def unjudged(name: str, output: str) -> dict[str, Any]:
    return row(name, "reference", "shadow", "skip", reason=str(Skip.NO_ORACLE), output=output)


ROWS = {
    "a_proved": [row("a_proved", "reference", "oracle"), row("a_proved", "torch", "oracle")],
    "a_checked": [row("a_checked", "reference", "oracle")],
    "b_agreed": [row("b_agreed", "reference", "shadow"), row("b_agreed", "torch", "shadow")],
    "b_consistent": [row("b_consistent", "reference", "shadow")],
    "b_lonely": [
        row("b_lonely", "reference", "shadow"),
        row("b_lonely", "torch", "shadow", "fail", reason="numerics"),
    ],
    "b_open": [row("b_open", "reference", "shadow"), unjudged("b_open", "z")],
}


def judged(*names: str) -> list[dict[str, Any]]:
    """The rows of some definitions, graded definition by definition."""
    return [found.as_json() for name in names for found in graded(typed(ROWS[name]))]


GRADES = {
    "a_proved": Grade.PROVED,
    "a_checked": Grade.CHECKED,
    "b_agreed": Grade.AGREED,
    "b_consistent": Grade.CONSISTENT,
    "b_lonely": Grade.CONSISTENT,
}


def test_a_passing_row_of_a_reference_says_how_strong_its_proof_is() -> None:
    for name, grade in GRADES.items():
        first, *others = judged(name)
        assert first["grade"] == grade
        assert not any("grade" in other for other in others)


def test_a_row_that_fails_is_about_conduct_or_passed_a_tolerance_has_no_grade() -> None:
    rows = [
        row("a_a", "reference", "oracle", "fail", reason="numerics"),
        row("a_a", "reference", "oracle", output="*"),
        row("a_a", "reference", "oracle", tolerance=0.1),
    ]
    assert not any(found.grade for found in graded(typed(rows)))


def test_a_definition_has_a_grade_only_where_all_its_outputs_were_judged() -> None:
    summary = summarise(judged(*ROWS), Known())
    assert {name: grade for name, grade in told(summary, "grade").items() if grade} == GRADES
    assert told(summary, "conclusion")["b_open"] == "unverified"
    assert told(summary, "conclusion")["b_agreed"] == "agreed"
    assert told(summary, "conclusion")["b_consistent"] == "consistent"


def test_a_definition_that_agrees_with_itself_alone_is_not_verified_unless_it_is_listed() -> None:
    assert summarise(judged("a_proved", "b_agreed"), Known())["verified"]
    assert not summarise(judged("a_proved", "b_consistent"), Known())["verified"]
    entry = {"definitions": {"b_consistent": "0" * 32}, "cases": ["small-0"], "outputs": ["y"], "verdict": "skip"}
    entry |= {"reason": "no_oracle", "why": "nobody has written an oracle for it"}
    rows = [found | {"digests": {"definition": "0" * 32}} for found in judged("a_proved", "b_consistent")]
    listed = summarise(rows, Known.model_validate({"findings": [entry]}))
    assert listed["verified"]
    assert told(listed, "conclusion")["b_consistent"] == "known"


def test_the_table_counts_grades_by_op_type_and_says_what_is_not_proved() -> None:
    text = table(summarise(judged("a_proved", "b_agreed", "b_consistent"), Known()))
    assert "Grades of proof" in text
    lines = [line for line in text.split("Grades of proof")[1].splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert cells == [["a", "1", "0", "0", "0", "0", "0", "0"], ["b", "0", "0", "1", "1", "0", "0", "0"]]
    assert "1 not verified: consistent with their own float64 alone" in text
    assert "1 agreed without an oracle, 1 consistent with float64 alone" in text
    assert "Grades of proof" not in table(summarise(judged("a_proved", "a_checked"), Known()))


@pytest.mark.parametrize(
    ("against", "truths", "verified"),
    [
        ("oracle", ("torch",), True),
        ("shadow", (), False),
        ("shadow", ("torch",), False),
        ("shadow", ("torch", "flashinfer"), True),
    ],
)
def test_without_an_oracle_it_takes_two_truths(against: str, truths: tuple[str, ...], *, verified: bool) -> None:
    definition = read(GATED).definition
    about: dict[str, Any] = {"digest": definition.digest, "status": "passed", "reason": "", "cases": ("small-0",)}
    about |= {"compared": 1, "skipped": {}, "gates": {}, "versions": {}, "device": None, "seed": 0}
    names = ("reference", *truths)
    found = {one: ImplementationVerdict(implementation=one, against=against, **about) for one in names}
    assert verification(definition, found).verified is verified
