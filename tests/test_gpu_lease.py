"""A run asks the driver once what GPUs there are; large jobs leave room for workers that have no lease."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from traceproof.pipeline import gpu_lease
from traceproof.pipeline.gpu_lease import PLACE_MIB, Gpu, gpus, lease


def test_a_run_asks_the_driver_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=[Gpu("0", 40_000), Gpu("1", 80_000)])
    monkeypatch.setattr(gpu_lease, "_asked", asked)
    assert gpus(tmp_path) == gpus(tmp_path) == asked.return_value
    assert asked.call_count == 1
    assert gpus(tmp_path / "absent") == gpus() == asked.return_value
    assert asked.call_count == 3


class Waits(Exception):  # noqa: N818 - no error
    """Raised in place of a lease's wait for room."""


def test_large_jobs_leave_room_for_idle_workers_and_small_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gpu_lease.VARIABLE, raising=False)
    monkeypatch.setattr(gpu_lease, "POOLS", 7)
    monkeypatch.setattr(time, "sleep", Mock(side_effect=Waits))
    found = [Gpu("0", 16 * PLACE_MIB)]  # one worker per pool: 8 units for all, of which 2 are no job's anyway
    with lease(found, memory_mib=7 * PLACE_MIB, folder=tmp_path):
        with pytest.raises(Waits), lease(found, memory_mib=7 * PLACE_MIB, folder=tmp_path):
            pass
        with (
            lease(found, memory_mib=4 * PLACE_MIB, folder=tmp_path) as one,
            lease(found, folder=tmp_path) as other,
        ):
            assert one == other == "0"
    with (
        lease(found, memory_mib=99 * PLACE_MIB, folder=tmp_path),
        pytest.raises(Waits),
        lease(found, folder=tmp_path),
    ):
        pass
