"""What is left on a stream that nothing waits for: channels to a GPU, and how CUDA names it in a capture."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceproof.execution.source import CallError
from traceproof.ops.cases import Case
from traceproof.reasons import Failure, Verdict
from traceproof.solutions.rows import left_behind
from traceproof.worker import Isolation, ItemOutcome, Status
from traceproof.worker.interpreter import CHANNELS, MOST_CHANNELS, Recipe

CASE = Case(id="small-1", size="small", axes={"batch_size": 7}, seed=0)


@pytest.mark.parametrize(("env", "channels"), [({}, "1"), (MOST_CHANNELS, "32")])
def test_solutions_have_channels_enough_for_streams_not_to_wait_for_each_other(
    env: dict[str, str], channels: str, tmp_path: Path
) -> None:
    recipe = Recipe(python="python", preload=(), env=env, gpu=True, readable=(), isolation=Isolation.TRUSTED)
    assert recipe.environment(tmp_path)[CHANNELS] == channels


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("torch.AcceleratorError: CUDA error: capturing stream has unjoined work\nCompile with ...", True),
        ("torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing", False),
    ],
)
def test_a_capture_tells_work_that_is_left_from_what_can_not_be_captured(message: str, *, left: bool) -> None:
    row = left_behind(CASE, CallError(ItemOutcome(index=0, status=Status.ERROR, message=message)), "graph")
    assert (row is not None) is left
    if row is not None:
        assert (row.verdict, row.reason, row.variant) == (Verdict.FAIL, Failure.LATE, "graph")
