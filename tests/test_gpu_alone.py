"""Calls of many small kernels take turns on a GPU, and a run asks the driver once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from traceproof.pipeline import gpu_lease
from traceproof.pipeline.gpu_lease import Gpu, gpus, turn

CALLERS = 6
HELD_SECONDS = 0.02
LATE_SECONDS = 20.0


def test_as_many_calls_run_at_a_time_as_may(tmp_path: Path) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def call() -> None:
        nonlocal inside, most
        with turn(tmp_path):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(HELD_SECONDS)
            with lock:
                inside -= 1

    callers = [threading.Thread(target=call) for _ in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LATE_SECONDS)
    assert (inside, most) == (0, gpu_lease.CALLS)


def test_a_call_that_hangs_lets_the_next_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lease, "CALLS", 1)
    monkeypatch.setattr(gpu_lease, "TURN_SECONDS", HELD_SECONDS)
    started = time.monotonic()
    with turn(tmp_path), turn(tmp_path):
        waited = time.monotonic() - started
    assert HELD_SECONDS <= waited < LATE_SECONDS
    with turn(tmp_path):
        pass


def test_jobs_on_another_gpu_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lease, "CALLS", 1)
    monkeypatch.setattr(gpu_lease, "TURN_SECONDS", LATE_SECONDS)
    monkeypatch.setenv(gpu_lease.VARIABLE, "0")
    started = time.monotonic()
    with turn(tmp_path):
        monkeypatch.setenv(gpu_lease.VARIABLE, "1")
        with turn(tmp_path):
            assert time.monotonic() - started < LATE_SECONDS


def test_a_run_asks_the_driver_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=[Gpu("0", 40_000), Gpu("1", 80_000)])
    monkeypatch.setattr(gpu_lease, "_asked", asked)
    assert gpus(tmp_path) == gpus(tmp_path) == asked.return_value
    assert asked.call_count == 1
    assert gpus(tmp_path / "absent") == gpus() == asked.return_value
    assert asked.call_count == 3
