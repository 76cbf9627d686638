"""How strong a proof is shows in rows, in the table, in the closing sentence, and in what may be published."""

from __future__ import annotations

from typing import Any

import pytest
from dialect_samples import GATED
from pipeline import summarise, told, typed

from traceproof.dataset.dialects import read
from traceproof.publish.verified import ImplementationVerdict, verification
from traceproof.reasons import Grade, Skip
from traceproof.run.known import Known
from traceproof.run.proof import graded
from traceproof.run.report import table


def row(name: str, implementation: str, against: str, verdict: str = "pass", **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    made = {
        "definition": name,
        "op_type": name.partition("_")[0],
        "case": "small-0",
        "implementation": implementation,
        "against": against,
        "output": "y",
        "verdict": verdict,
        "reason": None,
        "message": "",
        "repeat": "",
    }
    return made | more


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
    entry = {
        "definitions": {"b_consistent": "0" * 32},
        "cases": ["small-0"],
        "outputs": ["y"],
        "verdict": "skip",
        "reason": "no_oracle",
        "why": "nobody has written an oracle for it",
    }
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


def verdict_of(implementation: str, digest: str, against: str) -> ImplementationVerdict:
    return ImplementationVerdict(
        definition="silu_and_mul_h64",
        implementation=implementation,
        digest=digest,
        status="passed",
        reason="",
        cases=("small-0",),
        compared=1,
        skipped={},
        gates={},
        versions={},
        device=None,
        seed=0,
        against=against,
    )


@pytest.mark.parametrize(
    ("against", "truths", "verified"),
    [
        ("oracle", ("torch",), True),
        ("shadow", (), False),
        ("shadow", ("torch",), False),
        ("shadow", ("torch", "flashinfer"), True),
    ],
)
def test_without_an_oracle_two_ground_truths_are_needed_to_be_verified(
    against: str, truths: tuple[str, ...], *, verified: bool
) -> None:
    definition = read(GATED).definition
    found = {one: verdict_of(one, definition.digest, against) for one in ("reference", *truths)}
    assert verification(definition, found).verified is verified
