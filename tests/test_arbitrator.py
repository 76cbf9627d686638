"""Who is in the minority, what an answer looks like, and how strong a proof is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

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
from traceproof.judge.arbitration import agree, explain
from traceproof.judge.output import Expected, judge_output
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.ops.compare import Backward, Close, Comparison, Quantised
from traceproof.publish.verified import ImplementationVerdict, verification
from traceproof.reasons import Grade, Skip, Verdict
from traceproof.run.case import SolvedCase, fingerprints, make_inputs, solve
from traceproof.run.job import graded
from traceproof.run.known import Known
from traceproof.run.report import table
from traceproof.sandbox import Limits

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
