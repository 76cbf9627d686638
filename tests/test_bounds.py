"""A kernel that reads or writes beside its tensors ends, or is told of it, in the calls with fences."""

from __future__ import annotations

import pytest
from solution_judge import SolutionJudge, candidate

from traceproof.run.runner import FENCED_BEFORE, FENCED_BEHIND
from traceproof.run.untrusted import CallError
from traceproof.solutions.properties import chosen
from traceproof.solutions.trial import SolutionRun

pytestmark = pytest.mark.usefixtures("one_thread")
NORM = """import ctypes
import torch

def run(hidden_states, weight{more}):
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    {new}
    output.copy_(y)
    end = {of}.data_ptr() + {of}.numel() * {of}.element_size()
    {act}
    {back}
"""
READ, WRITE = "ctypes.string_at({}, 64)", "ctypes.memset({}, 0, 64)"
PLACES = {"before": "{of}.data_ptr() - 64", "behind": "end + 64"}
OWN = {"more": "", "new": "output = torch.empty_like(hidden_states)", "back": "return output"}
GIVEN = {"more": ", output", "new": "pass", "back": "pass"}


def ended(judge: SolutionJudge, text: str) -> dict[str, str]:
    """How the calls with fences end, by where the fence is near; nothing: as they should."""
    definition, cases = judge.planned("rmsnorm_h96")
    solution = candidate("norm", text).settled(definition)
    evaluation = SolutionRun.of(definition, solution, judge.settings, judge.pool)
    base = chosen(cases)
    assert base is not None
    subject, found = evaluation.subject(base.case), {}
    with evaluation.source() as source:
        for how in (FENCED_BEFORE, FENCED_BEHIND):
            try:
                taken = evaluation.call(source, subject, how=how)
            except CallError as error:
                found[how] = error.told
            else:
                assert not [row for row in evaluation.rule(subject, taken) if row.bad]
    return found


@pytest.mark.parametrize("form", [OWN, GIVEN], ids=["own", "given"])
def test_a_kernel_that_stays_inside_is_right_between_fences(form: dict[str, str], judge: SolutionJudge) -> None:
    assert ended(judge, NORM.format(of="output", act="pass", **form)) == {}


@pytest.mark.parametrize("act", [READ, WRITE], ids=["read", "write"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("of", ["hidden_states", "weight", "output"])
@pytest.mark.parametrize("form", [OWN, GIVEN], ids=["own", "given"])
def test_a_kernel_that_goes_outside_ends(
    form: dict[str, str], of: str, where: str, act: str, judge: SolutionJudge
) -> None:
    place = PLACES[where].format(of=of)
    found = ended(judge, NORM.format(of=of, act=act.format(place), **form))
    assert "SIGSEGV" in found[FENCED_BEFORE if where == "before" else FENCED_BEHIND]


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("assert weight.shape == hidden_states.shape[-1:]", "holds"),
        ("weight = torch.nn.functional.pad(weight, (0, hidden_states.shape[-1] - len(weight)))", "broken"),
        ("hidden_states = hidden_states.view(torch.bfloat16)", "broken"),
    ],
)
def test_inputs_that_are_ruled_out_are_refused_by_the_kernel_or_told(
    line: str, state: str, judge: SolutionJudge
) -> None:
    text = NORM.format(of="output", act="pass", **OWN).replace("    x =", f"    {line}\n    x =")
    trial = judge.trial(candidate("norm", text), "rmsnorm_h96")
    [found] = [one for one in trial.properties if one.name == "errors"]
    assert (found.state, found.bad) == (state, False), found.detail
