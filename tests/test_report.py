"""The summary fails on news, on an unexpected pass, and on nothing compared; known.yaml is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from traceproof.errors import TraceproofError
from traceproof.known import Known, read_known
from traceproof.stages.report import failed, report, summarise, table

WHY = "the reference's fault: see docs/findings.md, evidence there"


def row(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    plain = {
        "definition": "rmsnorm_h8",
        "op_type": "rmsnorm",
        "case": "small-0",
        "actor": "reference",
        "output": "output",
        "verdict": "pass",
        "reason": None,
        "message": "fine",
        "repeat": "traceproof verify --definition-name rmsnorm_h8 --case small-0",
    }
    return plain | changes


def known(**changes: Any) -> Known:  # noqa: ANN401 - JSON
    entry = {
        "definitions": ["rmsnorm_h8"],
        "cases": ["small-0"],
        "outputs": ["output"],
        "verdict": "fail",
        "reason": "nan",
        "why": WHY,
    }
    return Known.model_validate({"findings": [entry | changes]})


def test_a_known_finding_that_this_machine_skips_is_no_news() -> None:
    entry = known(actor="flashinfer", outputs=["*"])
    assert not summarise([row(actor="flashinfer", output="*", verdict="skip", reason="no_cuda")], entry)[
        "findings"
    ]["unexpected"]


def test_all_passing_is_verified() -> None:
    summary = summarise([row(), row(output="lse")], Known())
    assert not failed(summary)
    assert summary["groups"][0]["pass"] == 2
    assert "VERIFIED: 1 definitions: 1 pass" in table(summary)


@pytest.mark.parametrize("verdict", ["fail", "error"])
def test_a_new_finding_fails_and_is_named_with_its_repeat_command(verdict: str) -> None:
    summary = summarise([row(verdict=verdict, reason="nan", message="1 of 2 are NaN")], Known())
    assert failed(summary)
    text = table(summary)
    assert "NOT VERIFIED" in text
    assert "nan: 1 of 2 are NaN" in text
    assert "repeat  traceproof verify --definition-name rmsnorm_h8 --case small-0" in text


def test_a_known_finding_does_not_fail_but_stays_visible() -> None:
    summary = summarise([row(verdict="fail", reason="nan")], known())
    assert not failed(summary)
    assert summary["definitions"] == {"rmsnorm_h8": "fail"}
    assert "1 findings known" in table(summary)


def test_a_known_finding_that_passes_fails_the_run() -> None:
    summary = summarise([row()], known())
    assert failed(summary)
    assert "not as known.yaml says" in table(summary)


def test_a_known_finding_with_another_reason_fails_the_run() -> None:
    assert failed(summarise([row(verdict="fail", reason="shape")], known()))


def test_a_known_finding_of_another_actor_does_not_cover() -> None:
    assert failed(summarise([row(verdict="fail", reason="nan", actor="flashinfer")], known()))


def test_a_known_finding_that_was_not_run_is_no_news() -> None:
    assert not failed(summarise([row(case="small-1")], known()))


def test_a_finding_with_a_digest_means_that_definition_alone() -> None:
    entry = known(definitions={"rmsnorm_h8": "a" * 32})
    same, other = ({"digests": {"definition": digit * 32}} for digit in "ab")
    assert failed(summarise([row(**same)], entry))
    assert not failed(summarise([row(**other)], entry))
    assert not failed(summarise([row(verdict="fail", reason="nan", **same)], entry))
    assert failed(summarise([row(verdict="fail", reason="nan", **other)], entry))


def test_nothing_compared_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    summary = report([tmp_path / "empty.jsonl"], tmp_path / "summary.json", known=None)
    assert failed(summary)
    assert "nothing was compared" in table(summary)


def test_skips_are_counted_by_reason() -> None:
    rows = [
        row(),
        row(case="a", verdict="skip", reason="blob_missing"),
        row(case="b", verdict="skip", reason="no_cuda"),
    ]
    assert "blob_missing 1, no_cuda 1" in table(summarise(rows, Known()))


def test_an_actor_without_an_adapter_gets_no_line() -> None:
    rows = [
        row(),
        row(actor="fla", verdict="skip", reason="no_adapter"),
        row(actor="sglang", verdict="skip", reason="no_cuda"),
    ]
    text = table(summarise(rows, Known()))
    assert "fla" not in text
    assert "sglang" in text


def test_known_yaml_reports_all_problems_at_once(tmp_path: Path) -> None:
    path = tmp_path / "known.yaml"
    path.write_text("findings:\n- {definitions: [a], colour: red, verdict: pass}\n", encoding="utf-8")
    with pytest.raises(TraceproofError) as caught:
        read_known(path)
    text = str(caught.value)
    for part in ("findings.0.cases", "findings.0.colour", "findings.0.verdict", "findings.0.why"):
        assert part in text


def test_a_missing_known_yaml_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="known"):
        read_known(tmp_path / "absent.yaml")
