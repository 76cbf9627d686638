"""Workloads, traces and solutions: what is read, what is refused, what is written."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from traceproof.dataset.records import EvaluationStatus, Solution, Trace, Workload

WORKLOAD: dict[str, Any] = {
    "uuid": "w-1",
    "axes": {"batch_size": 3, "num_pages": 0},
    "inputs": {
        "q": {"type": "random"},
        "indptr": {"type": "safetensors", "path": "./blob/a.safetensors", "tensor_key": "indptr"},
        "indices": {"type": "safetensors", "path": "./blob/a.safetensors", "tensor_key": "indices"},
        "sm_scale": {"type": "scalar", "value": 0.08838834764831843},
        "count": {"type": "scalar", "value": 2},
        "whole": {"type": "scalar", "value": 2.0},
        "flag": {"type": "scalar", "value": True},
    },
}
EVALUATION: dict[str, Any] = {
    "status": "PASSED",
    "log": "",
    "correctness": {"max_relative_error": 0, "max_absolute_error": 1e-5, "extra": {"hit": [1, None]}},
    "performance": {"latency_ms": 0.1, "reference_latency_ms": 2, "speedup_factor": 20.0},
    "environment": {"hardware": "a GPU", "libs": {"torch": "2"}},
    "timestamp": "2026-01-01T00:00:00Z",
}
SOLUTION: dict[str, Any] = {
    "name": "mine",
    "definition": "rmsnorm_h8",
    "author": "somebody",
    "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"},
    "sources": [{"path": "main.py", "content": "def run(x):\n    return x\n"}],
}


def trace(**changes: object) -> dict[str, Any]:
    return {"definition": "d", "solution": None, "workload": WORKLOAD, "evaluation": None, **changes}


def written(value: object) -> str:
    """JSON text: tells 2 from 2.0 and keeps the order of keys out of it."""
    return json.dumps(value, sort_keys=True)


def test_a_workload_line_is_written_as_it_was_read() -> None:
    short = {"definition": "d", "workload": WORKLOAD}  # null and absent stay apart
    for line in (trace(), short):
        assert written(Trace.model_validate(line).as_json()) == written(line)
    workload = Workload.model_validate(WORKLOAD)
    assert list(workload.inputs) == list(WORKLOAD["inputs"])
    assert workload.blobs == ("./blob/a.safetensors",)


def test_correctness_and_performance_are_there_exactly_where_the_status_has_them() -> None:
    with_both = {"PASSED": (True, True), "INCORRECT_NUMERICAL": (True, False)}
    each = (False, True)
    for status, has_correctness, has_performance in product(EvaluationStatus, each, each):
        figures = {
            "correctness": EVALUATION["correctness"] if has_correctness else None,
            "performance": EVALUATION["performance"] if has_performance else None,
        }
        line = trace(solution="s", evaluation=EVALUATION | {"status": status.value} | figures)
        if (has_correctness, has_performance) == with_both.get(status, (False, False)):
            assert written(Trace.model_validate(line).as_json()) == written(line)
        else:
            with pytest.raises(ValidationError, match=f"status {status}"):
                Trace.model_validate(line)


@pytest.mark.parametrize("figure", ["NaN", "Infinity", 0, 0.5])
def test_error_figures_keep_their_spelling(figure: object) -> None:
    correctness = {"max_relative_error": figure, "max_absolute_error": figure}
    line = trace(solution="s", evaluation=EVALUATION | {"correctness": correctness})
    assert written(Trace.model_validate(line).as_json()) == written(line)


@pytest.mark.parametrize(
    "line",
    [
        trace(more=1),
        trace(solution="s"),
        trace(evaluation=EVALUATION),
        trace(workload=WORKLOAD | {"tolerance": 1e-3}),
        trace(workload=WORKLOAD | {"axes": {"M": -1}}),
        trace(workload=WORKLOAD | {"axes": {"M": 1.0}}),
        trace(workload=WORKLOAD | {"axes": {"M": True}}),
        trace(workload=WORKLOAD | {"uuid": ""}),
        trace(workload=WORKLOAD | {"inputs": {"q": {"type": "zeros"}}}),
        trace(workload=WORKLOAD | {"inputs": {"q": {}}}),
        trace(workload=WORKLOAD | {"inputs": {"q": {"type": "scalar", "value": "1"}}}),
        trace(workload=WORKLOAD | {"inputs": {"q": {"type": "safetensors", "path": "x"}}}),
        trace(solution="s", evaluation=EVALUATION | {"status": "FINE"}),
        trace(solution="s", evaluation=EVALUATION | {"correctness": {"max_absolute_error": -1.0}}),
        trace(solution="s", evaluation=EVALUATION | {"correctness": {"max_absolute_error": "much"}}),
        trace(solution="s", evaluation=EVALUATION | {"performance": {"latency_ms": -1.0}}),
    ],
)
def test_a_trace_outside_the_schema_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Trace.model_validate(line)


def test_a_solution_is_written_as_it_was_read() -> None:
    full = SOLUTION | {"description": None}
    full["spec"] = SOLUTION["spec"] | {
        "dependencies": ["torch"],
        "binding": "torch",
        "destination_passing_style": False,
    }
    for solution in (SOLUTION, full):
        read = Solution.model_validate(solution)
        assert written(read.as_json()) == written(solution)
        assert read.entry_file == "main.py"


@pytest.mark.parametrize(
    "change",
    [
        {"sources": []},
        {"sources": [{"path": "/main.py", "content": "x"}]},
        {"sources": [{"path": "../main.py", "content": "x"}]},
        {"sources": SOLUTION["sources"] * 2},
        {"sources": [{"path": "other.py", "content": "x"}]},
        {"spec": SOLUTION["spec"] | {"language": "Triton"}},
        {"spec": SOLUTION["spec"] | {"target_hardware": []}},
        {"spec": SOLUTION["spec"] | {"entry_point": "main.py"}},
        {"licence": "MIT"},
    ],
)
def test_a_solution_outside_the_schema_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Solution.model_validate(SOLUTION | change)


def test_what_is_written_passes_the_model_of_flashinfer_bench() -> None:
    theirs = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench is not installed")
    for line in (trace(), trace(solution="s", evaluation=EVALUATION)):
        assert theirs.Trace.model_validate_json(json.dumps(Trace.model_validate(line).as_json())).definition == "d"
    solution = Solution.model_validate(SOLUTION).as_json()
    assert theirs.Solution.model_validate_json(json.dumps(solution)).name == "mine"
