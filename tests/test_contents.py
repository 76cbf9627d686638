"""What a solution keeps by the address of any input shows, whatever its dtype; `contents` is measured for all."""

from __future__ import annotations

from dataclasses import replace

import op_support as ops
import pytest
from solution_judge import SolutionJudge, candidate

from traceproof.dataset.definition import Definition
from traceproof.solutions.reading import Candidate

KEPT = """
HELD = {{}}


def kept(*given):
    given = list(given)
    value = given[{place}]
    if not torch.is_tensor(value):
        return run(*given)
    key = value.data_ptr(), value.shape
    given[{place}] = HELD.setdefault(key, value.clone())
    return run(*given)
"""
INPUTS = (
    ("gemm_fp8", "b"),  # fp8
    ("page_append", "kv_indices"),
    ("sampling", "probs"),
    ("moe", "gemm1_weights"),  # whose cases are all large
)


def solution(definition: Definition, name: str) -> Candidate:
    place = list(definition.inputs).index(name)
    text = definition.reference + KEPT.format(place=place)
    return replace(candidate("kept", text, destinations=False), entry="main.py::kept")


@pytest.mark.parametrize(("op_type", "name"), INPUTS)
def test_what_is_kept_by_address_is_seen(op_type: str, name: str, judge: SolutionJudge) -> None:
    definition = next(one for one in ops.definitions(op_type) if name in one.inputs)
    trial = judge.trial(solution(definition, name), definition.name, only={"small-0", "small-1"})
    states = {one.name: one.state for one in trial.properties}
    assert judge.reasons_of(trial, definition.name)
    assert states.get("contents", "broken") == "broken"  # or another case has shown it
