"""Disagreement: who is in the minority, what an answer looks like, and what is left to look at."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from definitions import GOOD, rmsnorm, write
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline import Run

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.judge.arbitration import agree, explain
from traceproof.judge.output import Expected, judge_output
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.ops.compare import Backward, Close, Comparison, Quantised
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, fingerprints, make_inputs, solve
from traceproof.sandbox import Limits

LIMITS = Limits(seconds=20.0, memory_bytes=2 << 30)
OWN = Path(__file__).parent / "dataset" / "definitions"


def subject(path: str, case_id: str = "small-1") -> SolvedCase:
    definition = Definition.model_validate_json((OWN / f"{path}.json").read_text(encoding="utf-8"))
    found = registry.get(definition.op_type).of_form(definition).cases(definition, sizes=("small",), seed=0)
    return solve(definition, next(case for case in found if case.id == case_id))


def own(prefix: str) -> str:
    """A definition of ours whose name starts so."""
    return next(path.relative_to(OWN).with_suffix("").as_posix() for path in sorted(OWN.rglob(f"{prefix}*.json")))


def test_a_logarithm_of_the_other_base_is_recognised() -> None:
    about = subject(own("mla_ragged"))
    expected = about.expected("lse")
    natural = (expected.oracle[""] * math.log(2)).to(expected.dtype)
    [told, *_] = explain(about, "lse", natural, expected)
    assert told == "ratio 0.69315 everywhere: the natural logarithm where base 2 is meant"


@pytest.mark.parametrize("prefix", ["mla_ragged", "rmsnorm_h96", "rope", "mamba_ssu"])
def test_most_bugs_of_the_calibration_are_recognised_by_name(prefix: str) -> None:
    about = subject(own(prefix))
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


@settings(max_examples=60, deadline=None)
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
