"""What generated tests came to: known failures and counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm, write

from traceproof.errors import TraceproofError
from traceproof.run.known import Known
from traceproof.run.workers import Environment
from traceproof.sandbox import Limits
from traceproof.stacks import MAIN
from traceproof.testgen.generate import PLACE, Divergences, generate
from traceproof.testgen.generate import GenerateOptions as Wanted
from traceproof.testgen.running import DefinitionTestRow, OpTypeTests, run_tests
from traceproof.testgen.summary import described, judged, table


def row(**changes: Any) -> DefinitionTestRow:  # noqa: ANN401 - values of a row
    plain: dict[str, Any] = {
        "op_type": "gemm",
        "stack": "torch",
        "definition": "gemm_a",
        "digest": "0" * 32,
        "test": "test_correctness",
        "case": "small-0",
        "outcome": "passed",
        "message": "",
        "seconds": 0.5,
    }
    found: DefinitionTestRow = plain | changes  # type: ignore[assignment]
    return found


def known(**changes: Any) -> Known:  # noqa: ANN401 - values of an entry
    entry = {
        "definitions": {"gemm_a": "0" * 32},
        "cases": ["edge-zeros"],
        "outputs": ["C"],
        "verdict": "fail",
        "reason": "nan",
        "why": "the reference divides by zero there",
    }
    return Known.model_validate({"findings": [entry | changes]})


def test_a_failure_of_a_case_that_is_known_to_diverge_is_no_finding() -> None:
    rows = [row(), row(case="edge-zeros", test="test_edge_cases", outcome="failed")]
    assert judged(rows, known(), {})["passed"]
    assert not judged(rows, known(cases=["edge-empty"]), {})["passed"]
    assert not judged([row(case="edge-zeros", outcome="failed", digest="1" * 32)], known(), {})["passed"]


def test_a_ground_truth_s_known_finding_counts_in_its_own_stack_and_version() -> None:
    entry = known(implementation="flashinfer", versions="flashinfer-python<0.8")
    rows = [row(case="edge-zeros", outcome="failed", stack="flashinfer", test="test_correctness_vs_flashinfer")]
    assert judged(rows, entry, {"flashinfer": {"flashinfer-python": "0.7.2"}})["passed"]
    assert not judged(rows, entry, {"flashinfer": {"flashinfer-python": "0.8"}})["passed"]
    assert not judged([row(case="edge-zeros", outcome="failed")], entry, {})["passed"]


def test_no_test_at_all_is_a_finding() -> None:
    report = judged([], Known(), {})
    assert not report["passed"]
    assert "no test was run" in table(report)


def test_what_failed_is_listed_with_what_it_said() -> None:
    report = judged([row(outcome="failed", message="gemm_a, case small-0\nmore"), row()], Known(), {})
    assert "FAILED gemm_a test_correctness[small-0] in torch: gemm_a, case small-0" in table(report)


def test_a_description_counts_rows_of_this_state_of_a_definition_only() -> None:
    rows = judged([row(), row(outcome="skipped"), row(digest="1" * 32)], Known(), {})["rows"]
    assert described(rows, {"gemm_a": "0" * 32}, ["gemm_a"]) == "gemm_a in torch: 1 passed, 1 skipped"


@pytest.mark.slow
def test_definitions_side_by_side_give_their_rows_in_order(tmp_path: Path) -> None:
    names = ["rmsnorm_a", "rmsnorm_b", "rmsnorm_c"]
    for name in names:
        write(tmp_path, rmsnorm(name))
    wanted = Wanted(root=tmp_path, everything=True, sizes=("small",))
    generate(wanted, Divergences())
    order = OpTypeTests(
        folder=tmp_path / PLACE,
        op_type="rmsnorm",
        stack="torch",
        dataset=tmp_path,
        digests=dict.fromkeys(names, "0" * 32),
        options=["-k", "test_numerical_correctness or vs_flashinfer", "--test-sizes=small"],
        limits=Limits(seconds=120.0),
    )
    rows = list(run_tests(order, Environment(name=MAIN, python=sys.executable), parallel=2))
    assert list(dict.fromkeys(row["definition"] for row in rows)) == names
    counts = {name: sum(row["definition"] == name for row in rows) for name in names}
    assert len(set(counts.values())) == 1
    assert {row["outcome"] for row in rows} == {"passed", "skipped"}  # what needs a GPU
    file = tmp_path / PLACE / "test_rmsnorm_b.py"
    file.write_text(file.read_text() + "# edited\n")
    with pytest.raises(TraceproofError, match="is not as it was generated"):
        list(run_tests(order, Environment(name=MAIN, python=sys.executable)))
