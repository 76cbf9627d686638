"""What lies by the baseline is within the gate's limits, and is not measured against the oracle row by row."""

from __future__ import annotations

import op_support as ops
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.gates import Near, gate_of
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.ops.compare import Close
from traceproof.reasons import Verdict
from traceproof.run import judging
from traceproof.run.case import CPU, make_inputs
from traceproof.run.judging import BESIDE, LargeCase

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (64, 512)
NARROW = (torch.bfloat16, torch.float16)


def stepped(value: torch.Tensor, share: float, seed: int, *, up: bool = False) -> torch.Tensor:
    """A share of the elements one step of the dtype off; `up`: all of these away from zero."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(value.shape, generator=draw) < share
    way = torch.ones(value.shape) if up else torch.rand(value.shape, generator=draw).round() * 2 - 1
    return (value.view(torch.int16) + (chosen * way).to(torch.int16)).view(value.dtype)


def near(actual: torch.Tensor, baseline: torch.Tensor) -> bool:
    found = Near(actual.dtype)
    return found.add(actual, baseline) and found.straight


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.03, 0.049])
@pytest.mark.parametrize("scale", [1.0, 2.0**-9])
def test_what_lies_by_the_baseline_passes_the_gate(dtype: torch.dtype, share: float, scale: float) -> None:
    passed = 0
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        value = torch.randn(SHAPE, generator=draw, dtype=torch.float64)
        value[:, seed] *= 300.0
        # a baseline that loses what float32 does, and one that loses as much as its own rounding
        lost = torch.randn(SHAPE, generator=draw, dtype=torch.float64) * value.abs() * scale
        baseline = (value + lost * 2.0**-9).to(dtype)
        actual = stepped(baseline, share, seed, up=bool(seed % 2))
        if near(actual, baseline):
            passed += 1
            gate = gate_of(actual, {"": value, "baseline": baseline}, Close())
            assert gate.margin <= 1.01, gate.detail
    assert passed or share > 0.01


@pytest.mark.parametrize("dtype", NARROW)
def test_what_lies_farther_away_is_measured(dtype: torch.dtype) -> None:
    baseline = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert near(baseline, baseline)
    for place, wrong in ((0, 0.0), (5, float("nan")), (9, float("inf")), (11, -1.0)):
        other = baseline.clone()
        other[place, place] = other[place, place] * 1.02 if wrong < 0 else wrong
        assert not near(other, baseline), place
    assert not near(stepped(baseline, 0.5, 2), baseline)
    row = baseline.clone()
    row[3] = stepped(row[3:4], 1.0, 3)[0]
    assert not near(row, baseline)
    infinite = torch.full(SHAPE, torch.finfo(dtype).max, dtype=dtype)
    assert not near(infinite, infinite)
    assert not Near.applies(Close(factor=1.0), dtype)
    assert not Near.applies(Close(), torch.float32)


@pytest.mark.parametrize("definition", ops.definitions("rmsnorm"), ids=lambda one: one.name)
def test_a_large_case_is_as_right_as_its_worst_row(
    definition: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(judging.CHUNK_ELEMENTS, "cpu", 1024)
    op = registry.get(definition.op_type).of_form(definition)
    [rows] = definition.var_axes
    case = Case("large", "workloads", {rows: 200}, 0)
    inputs = make_inputs(op, definition, case, device=CPU)
    large = LargeCase(definition=definition, op=op, case=case, inputs=inputs, tolerance=None, figures=False)
    right = op.baseline(definition, inputs)
    wrong = {name: value.clone() for name, value in right.items()}
    wrong["output"][-1] *= 1.02
    found = large.rulings({"right": right, "wrong": wrong, "alone": right}, CPU)
    assert {name: one["output"].verdict for name, one in found.items()} == {
        "right": Verdict.PASS,
        "wrong": Verdict.FAIL,
        "alone": Verdict.PASS,
    }
    [alone] = large.rulings({"alone": right}, CPU).values()
    assert all(ruling.verdict is Verdict.PASS for ruling in alone.values())
    narrow = all(spec.dtype in {"bfloat16", "float16"} for spec in definition.outputs.values())
    assert all(ruling.message.endswith(BESIDE) == narrow for ruling in alone.values())
