"""The gates' error rates: measured honestly, over families that cover every op_type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import op_support as ops
import pytest
import torch

from calibration.measure import OURS, SIZES, Rates, Tally, Unit, measure, run, together, units
from traceproof.dataset.definition import Definition
from traceproof.judge.gates import Gate, gate_of
from traceproof.ops.compare import Backward, Close, Quantised
from traceproof.ops.families.expert import MOE
from traceproof.ops.families.norm import RMSNORM
from traceproof.ops.families.product import GEMM
from traceproof.ops.formula import Mutant

NORM = ops.load("rmsnorm", "rmsnorm_h96")


def rates(definition: Definition, *, seeds: int = 1) -> Rates:
    return measure([definition], seeds=seeds, wrong_seeds=seeds, sizes=("small",))


def share(found: Rates, kind: str) -> float:
    """How much of the wrong, or of the right answers, is refused."""
    answers: dict[str, Tally] = getattr(found, kind)
    tallies = [tally for tally in answers.values() if tally.runs]
    return sum(tally.refused[OURS] for tally in tallies) / sum(tally.runs for tally in tallies)


@pytest.mark.parametrize(
    ("op", "definition", "loose"),
    [
        (RMSNORM, NORM, {"output": Close(200.0)}),
        (GEMM, ops.load("gemm", "gemm_n96_k160"), {"C": Backward(1e6)}),
        (
            MOE,
            ops.load("moe", "trtllm_fp8_per_tensor_scale_moe_topk1_e16_h512_i512"),
            {"output": Quantised(rms=10.0, slope=1.0)},
        ),
    ],
    ids=["close", "backward", "quantised"],
)
def test_a_loosened_gate_lets_wrong_answers_through(
    op: object, definition: Definition, loose: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "comparisons", lambda *_: loose)
    found = rates(definition)
    assert share(found, "right") == 0.0
    assert 0.2 < share(found, "wrong") < 0.95


def test_a_gate_that_refuses_all_is_seen_in_the_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNORM, "comparisons", lambda *_: {"output": Close(0.01)})
    assert share(rates(NORM), "right") > 0.2


def test_an_answer_with_the_right_bits_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    same, never = Mutant("same"), Mutant("never", applies=lambda _: False)
    monkeypatch.setattr(RMSNORM, "mutants", (same, never))
    found = rates(NORM)
    for name in ("same", "never"):
        assert (found.wrong[name].runs, found.wrong[name].hidden) == (0, 1)


def held(actual: torch.Tensor, expected: torch.Tensor, roundings: torch.Tensor | None, kind: Quantised) -> Gate:
    return gate_of(actual, {"": expected} | ({} if roundings is None else {"roundings": roundings}), kind)


def test_a_slope_may_be_off_by_luck_and_not_by_more() -> None:
    """Errors of 5 % on 100 equal parts tilt a slope by 0.5 %; a factor of 1.04 is 8 times that."""
    expected = torch.full((1, 100), 1.0, dtype=torch.float64)
    error = torch.where(torch.arange(100) % 2 == 0, 0.05, -0.05)
    kind = Quantised(rms=0.2, slope=0.001)
    many, few = torch.tensor([1e6]), torch.tensor([100.0])
    tilted = expected * 1.015 + error
    assert not held(tilted, expected, many, kind).ok
    assert not held(tilted, expected, None, kind).ok
    assert held(tilted, expected, few, kind).ok
    assert not held(expected * 1.04 + error, expected, few, kind).ok
    assert not held(expected * 1.015, expected, few, kind).ok  # nothing else is off: no luck


def test_rows_of_a_matrix_are_averaged_where_their_errors_hang_together() -> None:
    """One row's rounding is thrice the others': luck of one number, not an error of the whole."""
    expected = torch.ones((1, 64, 8), dtype=torch.float64)
    baseline = expected + 1e-3
    actual = expected + 1e-3
    actual[0, 5] += 4e-3
    assert not gate_of(actual, {"": expected, "baseline": baseline}, Close()).ok
    assert gate_of(actual, {"": expected, "baseline": baseline}, replace(Close(), row_axes=2)).ok
    assert not gate_of(actual + 4e-3, {"": expected, "baseline": baseline}, replace(Close(), row_axes=2)).ok


@pytest.mark.slow
def test_units_put_together_are_one_measurement_and_one_that_raises_is_told_and_not_kept(tmp_path: Path) -> None:
    folder = tmp_path / "units"
    found = units([NORM], seeds=3, wrong_seeds=2)
    assert [(unit.seed, unit.wrong) for unit in found] == [(0, True), (1, True), (2, False)]
    broken = Unit(NORM.model_copy(update={"op_type": "nonesuch"}), 0, wrong=True)
    errors = {id(unit): error for unit, error in run([*found, broken], folder, jobs=1)}
    assert [errors[id(unit)] for unit in found] == [None, None, None]
    assert isinstance(errors[id(broken)], KeyError)
    assert len(list(folder.iterdir())) == len(found)
    assert not list(run(found, folder, jobs=1))  # all are kept
    whole = measure([NORM], seeds=3, wrong_seeds=2, sizes=SIZES)
    assert together("rmsnorm", found, folder) == whole


pytestmark = pytest.mark.usefixtures("one_thread")
