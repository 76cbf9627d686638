"""Times of what passed: cold, fresh, in turns with others, by clocks that agree; timed answers are judged too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from solution_judge import SolutionJudge, candidate, solution_judge

from traceproof.dataset.records import Trace
from traceproof.run import calls
from traceproof.solutions import speed
from traceproof.solutions.records import Certificate, Digests, SpeedResult, Times
from traceproof.solutions.render import page, table, trace_lines

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "rmsnorm_h96"
NORM = """import torch

CALLS = [0]


def run(hidden_states, weight):
    CALLS[0] += 1
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return (y * weight.float()).to(hidden_states.dtype)
"""
# No other worker makes so many calls.
LAZY = NORM.replace(
    "    x = hid", "    if CALLS[0] > 80:\n        return torch.zeros_like(hidden_states)\n    x = hid"
)


@pytest.fixture(scope="module")
def judged_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SolutionJudge]:
    with solution_judge(tmp_path_factory.mktemp("judging")) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "MOST_ON_CPU", 30)
        patch.setattr(speed, "CASES", 1)
        settings = found.settings.model_copy(update={"timed": True})
        yield replace(found, settings=settings)


def test_what_passes_is_timed_beside_the_ground_truth_and_the_reference(
    judged_by: SolutionJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "SLACK_MS", 1e6)  # what clocks differ by on a busy machine
    trial = judged_by.trial(candidate("right", NORM), NAME)
    assert judged_by.reasons_of(trial, NAME) == []
    [one] = trial.speed
    assert [times.name for times in one.times] == ["solution", "torch", "reference"]
    assert {times.calls for times in one.times} == {90}
    assert all(0 < times.lower <= times.median <= times.upper for times in one.times)
    assert one.clocks.startswith("before: CPU, wall clock")
    assert one.max_abs is not None
    assert (one.ratio("torch") or 0) > 0
    certificate = _certificate(trial.speed)
    [line] = trace_lines(certificate)
    trace = Trace.model_validate(json.loads(line))
    assert trace.evaluation is not None
    assert trace.evaluation.performance is not None
    assert trace.evaluation.performance.latency_ms == one.times[0].mean
    assert "milliseconds per call" in table(certificate)
    assert "milliseconds per call" in page(certificate)


def test_a_kernel_that_does_nothing_once_it_is_timed_is_refused(judged_by: SolutionJudge) -> None:
    trial = judged_by.trial(candidate("lazy", LAZY), NAME)
    assert [one for one in judged_by.reasons_of(trial, NAME) if ", time: " in one]


def test_a_clock_that_a_solution_patches_is_not_the_one_that_is_read(judged_by: SolutionJudge) -> None:
    patched = NORM.replace(
        "CALLS = [0]", "import time\n\ntime.perf_counter_ns = time.time_ns = lambda: 0\nCALLS = [0]"
    )
    trial = judged_by.trial(candidate("patched", patched), NAME)
    assert judged_by.reasons_of(trial, NAME) == []
    assert all(times.lower > 0 for one in trial.speed for times in one.times)


def test_times_that_are_not_believed_are_told_and_in_no_trace() -> None:
    case = {"case": "small-0", "size": "small", "axes": {"n": 1}, "inputs": {}, "clocks": "clock", "outside": 5.0}
    times = (_times(), _times().model_copy(update={"name": "reference"}))
    certificate = _certificate((SpeedResult.model_validate({**case, "times": times, "doubt": "it lies"}),))
    assert list(trace_lines(certificate)) == []
    assert "TIMES OF small-0 NOT BELIEVED: it lies" in table(certificate)
    assert "it lies" in page(certificate)


def _times(**changes: float) -> Times:
    given = dict.fromkeys(("first", "median", "lower", "upper", "mean", "wall"), 1.0) | changes
    return Times(name="solution", calls=30, **given)


@pytest.mark.parametrize(
    ("times", "outside", "said"),
    [
        (_times(), 1.1, ""),
        (_times(wall=1.4), 1.1, ""),
        (_times(wall=9.0), 9.0, "between events"),
        (_times(), 5.0, "by a clock outside"),
    ],
)
def test_clocks_that_do_not_agree_are_named(times: Times, outside: float, said: str) -> None:
    told = speed.doubt(times, outside, idle=0.02)
    assert said in told
    assert bool(said) == bool(told)


def test_every_repetition_has_new_contents_at_new_addresses() -> None:
    value, scale = torch.arange(12.0).reshape(3, 4), torch.ones(1)
    watch = calls.Stopwatch([value, scale, 7], 0, torch.device("cpu"), seed=1)
    seen = [watch.repeat(lambda given: given[0].clone(), turn) for turn in range(12)]
    assert len({tuple(returned.flatten().tolist()) for _, _, returned, _ in seen}) == 12
    assert len({given[0].data_ptr() for *_, given in seen}) > 6
    assert all(torch.equal(returned, calls.moved(value, turn)) for turn, (_, _, returned, _) in enumerate(seen))
    assert torch.equal(value, torch.arange(12.0).reshape(3, 4))
    assert watch.repeat(None, 0)[2] is None


def _certificate(found: tuple[SpeedResult, ...]) -> Certificate:
    about = {"solution": "right", "path": "right.py", "language": "python", "entry": "right.py::run"}
    about |= {"definition": NAME, "op_type": "rmsnorm", "definition_path": "x.json", "against": "oracle"}
    about |= {
        "verdict": "accepted",
        "isolation": "",
        "device": "a CPU",
        "repeat": "traceproof judge right.py --time",
    }
    none = dict.fromkeys(("reasons", "rows", "properties", "precision"), ())
    digests = Digests(definition="a", solution="b", code="c")
    made = {"digests": digests, "hidden_seed": 1, "tolerance": None, "versions": {"torch": "2"}, "speed": found}
    return Certificate.model_validate({**about, **none, **made, "judged_at": "2026-11-22T12:00:00+00:00"})
