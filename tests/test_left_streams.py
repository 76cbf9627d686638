"""What is left on a stream that nothing waits for: channels to a GPU, and how CUDA names it in a capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from solution_judge import candidate, solution_judge

from traceproof.ops.cases import Case
from traceproof.reasons import Failure, Verdict
from traceproof.run.untrusted import CallError
from traceproof.sandbox import Reply, Status
from traceproof.solutions.properties import CHANNELS
from traceproof.solutions.trial import SolutionRun, left_behind

CASE = Case(id="small-1", size="small", axes={"batch_size": 7}, seed=0)


SOURCE = """
import os


def run(hidden_states, weight):
    return hidden_states * 0 + float(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "0"))
"""


@pytest.mark.parametrize("channels", [None, CHANNELS])
def test_a_process_may_have_more_channels_to_a_gpu(channels: int | None, tmp_path: Path) -> None:
    with solution_judge(tmp_path) as judge:
        definition, cases = judge.planned("rmsnorm_h96")
        evaluation = SolutionRun.of(definition, candidate("one", SOURCE), judge.settings, judge.pool)
        subject = evaluation.subject(next(case.case for case in cases if case.id == "small-0"))
        with evaluation.source(channels=channels) as source:
            (output,) = evaluation.call(source, subject).outputs.values()
    assert isinstance(output, torch.Tensor)
    assert bool((output == (channels or 0)).all())


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("torch.AcceleratorError: CUDA error: capturing stream has unjoined work\nCompile with ...", True),
        ("torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing", False),
    ],
)
def test_a_capture_tells_work_that_is_left_from_what_can_not_be_captured(message: str, *, left: bool) -> None:
    row = left_behind(CASE, CallError(Reply(status=Status.ERROR, message=message)), "graph")
    assert (row is not None) is left
    if row is not None:
        assert (row.verdict, row.reason, row.variant) == (Verdict.FAIL, Failure.LATE, "graph")
