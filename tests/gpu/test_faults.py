"""A kernel that faults, one that hangs and a killed worker cost one case each; needs a CUDA device."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from traceproof.run.calls import CUDA_LOST, cuda_is_lost
from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import Limits
from traceproof.stacks import MAIN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HANG_CYCLES = 1 << 45  # hours
SECONDS = 15.0


def _fault() -> None:
    values = torch.zeros(4, device="cuda")
    values[torch.full((4,), 1 << 20, device="cuda")].sum().item()  # a device-side assertion


def _hang() -> None:
    torch.cuda._sleep(HANG_CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DEEDS = {"fine": lambda: None, "fault": _fault, "hang": _hang, "die": _die}


def setup(payload: Any) -> Callable[[str], float]:  # noqa: ANN401 - any JSON
    """Worker side: one action per item, then a sum that a poisoned context can not compute."""
    del payload

    def run(deed: str) -> float:
        try:
            DEEDS[deed]()
            return float(torch.ones(1000, device="cuda").sum())
        except RuntimeError:
            if cuda_is_lost():
                os._exit(CUDA_LOST)
            raise

    return run


def test_each_misdeed_costs_one_case() -> None:
    actions = ["fine", "fault", "fine", "hang", "fine", "die", "fine"]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    record = {"device_type": "cuda", "digest": ""}
    here = Environment(name=MAIN, python=sys.executable, record=record, path=tuple(paths))
    with Worker(here, "test_faults:setup", {}, Limits(seconds=SECONDS)) as worker:
        outcomes = [worker.ask(action) for action in actions]
    got = [str(outcome.status) for outcome in outcomes]
    assert got == ["ok", "crash", "ok", "timeout", "ok", "crash", "ok"]
    assert [outcome.value for outcome in outcomes[::2]] == [1000.0] * 4
