"""A call that wants a GPU to itself keeps others waiting for a while, and a run asks the driver once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from traceproof.execution import gpu_alone
from traceproof.execution.gpu_alone import admit, alone
from traceproof.pipeline import gpu_lease
from traceproof.pipeline.gpu_lease import VARIABLE, Gpu, alone_file, gpus

HELD_SECONDS = 0.2
CALLERS = 3


def seconds_of(wait: Path) -> float:
    started = time.monotonic()
    admit(wait)
    return time.monotonic() - started


def test_nobody_waits_where_no_call_wants_the_gpu(tmp_path: Path) -> None:
    with alone(tmp_path / "lock", "run"):
        pass
    assert max(seconds_of(tmp_path / "absent"), seconds_of(tmp_path / "lock")) < HELD_SECONDS


def test_one_call_at_a_time_has_it_to_itself_and_others_wait(tmp_path: Path) -> None:
    inside: list[int] = []
    most = 0

    def call(number: int) -> None:
        nonlocal most
        with alone(tmp_path / "lock", "run"):
            inside.append(number)
            most = max(most, len(inside))
            time.sleep(HELD_SECONDS)
            inside.remove(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
    for caller in callers:
        caller.start()
    while not inside:
        time.sleep(HELD_SECONDS / 100)
    assert seconds_of(tmp_path / "lock") >= HELD_SECONDS / 2
    for caller in callers:
        caller.join()
    assert most == 1


def test_later_in_a_run_and_for_a_call_that_hangs_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_alone, "ALONE_SECONDS", HELD_SECONDS)
    with alone(tmp_path / "lock", "run"):
        monkeypatch.setattr(gpu_alone, "ALONE_SECONDS", 100 * HELD_SECONDS)
        assert seconds_of(tmp_path / "lock") < 50 * HELD_SECONDS
        monkeypatch.setattr(gpu_alone, "ALONE_SECONDS", HELD_SECONDS)
        with alone(tmp_path / "lock", "run"):
            monkeypatch.setattr(gpu_alone, "ALONE_SECONDS", 100 * HELD_SECONDS)
            assert seconds_of(tmp_path / "lock") < HELD_SECONDS
    with alone(tmp_path / "lock", "next"):
        monkeypatch.setattr(gpu_alone, "ALONE_SECONDS", HELD_SECONDS)
        assert seconds_of(tmp_path / "lock") >= HELD_SECONDS


def test_each_gpu_has_a_lock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    files = set()
    for gpu in ("0", "1"):
        monkeypatch.setenv(VARIABLE, gpu)
        files.add(alone_file())
    assert len(files) == 2


def test_a_run_asks_the_driver_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=[Gpu("0", 40_000), Gpu("1", 80_000)])
    monkeypatch.setattr(gpu_lease, "_asked", asked)
    assert gpus(tmp_path) == gpus(tmp_path) == asked.return_value
    assert asked.call_count == 1
    assert gpus(tmp_path / "absent") == gpus() == asked.return_value
    assert asked.call_count == 3
