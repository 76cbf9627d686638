"""A kernel that faults, one that hangs and a killed worker cost one case each; needs a CUDA device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from traceproof.run.calls import CUDA_LOST, cuda_is_lost
from traceproof.sandbox import Isolation, Limits, Pool

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


def setup(payload: Any, scratch: Path) -> Callable[[str], float]:  # noqa: ANN401 - any JSON
    """Worker side: one action per item, then a sum that a poisoned context can not compute."""
    del payload, scratch

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
    with Pool(gpu=True, env={"PYTHONPATH": os.pathsep.join(paths)}) as pool:
        outcomes = list(
            pool.run_items(
                setup="test_faults:setup",
                payload=None,
                items=actions,
                limits=Limits(seconds=SECONDS),
                isolation=Isolation.TRUSTED,
            )
        )
    got = [str(outcome.status) for outcome in outcomes]
    assert got == ["ok", "crash", "ok", "timeout", "ok", "crash", "ok"]
    assert [outcome.value for outcome in outcomes[::2]] == [1000.0] * 4
