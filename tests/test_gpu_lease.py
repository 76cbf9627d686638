"""A run asks the driver once what GPUs there are."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from traceproof.pipeline import gpu_lease
from traceproof.pipeline.gpu_lease import Gpu, gpus


def test_a_run_asks_the_driver_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=[Gpu("0", 40_000), Gpu("1", 80_000)])
    monkeypatch.setattr(gpu_lease, "_asked", asked)
    assert gpus(tmp_path) == gpus(tmp_path) == asked.return_value
    assert asked.call_count == 1
    assert gpus(tmp_path / "absent") == gpus() == asked.return_value
    assert asked.call_count == 3
