"""Chunks of an output are judged as the whole is."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from test_judge import SHAPE, infinite, nan_row, noisy, one_element, oracle_value

from traceproof.judge.gates import gate_of, numeric_gate
from traceproof.judge.numerics import Numeric
from traceproof.judge.output import Expected, Ruling, judge_output, numerics_of, rule_on
from traceproof.ops.compare import Backward, Close, Comparison, Exact, Quantised

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
    numerics = numerics_of(cast("Numeric", kind), actual.dtype, None)
    parts = [slice(start, start + rows) for start in range(0, len(actual), rows)]
    for part in parts:
        prepared = numerics.measure(actual[part], {k: v[part] for k, v in entries.items()}, part.start)
        if not numerics.two_passes:
            numerics.hold_prepared(prepared)
    for part in parts if numerics.two_passes else ():
        numerics.hold(actual[part], {k: v[part] for k, v in entries.items()})
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
    entries = {
        "": value,
        "baseline": noisy(value, 2).double(),
        "bound": torch.full(SHAPE, 1e-3, dtype=torch.float64),
    }
    actual = edge_of(KINDS[kind], entries, outwards)
    gate = numeric_gate(cast("Numeric", KINDS[kind]), torch.bfloat16)
    parts = [{k: v[row : row + 1] for k, v in entries.items()} for row in range(len(actual))]
    for row, part in enumerate(parts):
        gate.pool(gate.prepare(actual[row : row + 1], part))
    for row, part in enumerate(parts):
        gate.hold(gate.prepare(actual[row : row + 1], part))
    assert gate.gate().margin == pytest.approx(outwards, rel=1e-6)
    assert gate.gate().ok == (outwards < 1)
