"""What a stack's workers find imported, and how far they stand back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worker_pools import KINDS, SOURCES, TESTS

from traceproof.stages.crew import COMPILER, PRELOAD, environment, preload
from traceproof.worker import Limits, Pool
from traceproof.worker.model import NICE


def stack(name: str, device: str) -> dict[str, Any]:
    return {"stack": name, "device_type": device, "digest": "0" * 32}


def test_what_takes_long_to_import_is_imported_once_where_a_gpu_is() -> None:
    for name in ("sglang", "fla"):
        assert preload(stack(name, "cuda")) == (*PRELOAD, *COMPILER)
        assert preload(stack(name, "cpu")) == PRELOAD
    assert preload(stack("torch", "cuda")) == PRELOAD


def test_what_is_imported_ahead_starts_no_thread() -> None:
    code = f"import os\nfor name in {COMPILER}:\n __import__(name)\nprint(len(os.listdir('/proc/self/task')))"
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=alone)
    assert done.stdout.split() == ["1"]


def test_references_stand_back_for_imports(tmp_path: Path) -> None:
    told = {name: int(environment(tmp_path, stack(name, "cuda"))[NICE]) for name in ("torch", "sglang", "fla")}
    assert told["torch"] > told["sglang"] == told["fla"] == 0
    assert NICE not in environment(tmp_path, stack("torch", "cpu"))


@pytest.mark.parametrize("kind", ["trusted", "untrusted"])
def test_workers_stand_back_as_their_interpreter_is_told(kind: str) -> None:
    isolation, without = KINDS[kind]
    path = os.pathsep.join([str(SOURCES), str(TESTS)])
    here = os.nice(0)
    with Pool(env={"PYTHONPATH": path, NICE: "3"}, without=without) as pool:
        (outcome,) = pool.run_items(
            setup="worker_misdeeds:setup",
            payload=None,
            items=[{"do": "stand"}],
            limits=Limits(seconds=20),
            isolation=isolation,
        )
    assert outcome.value == [min(19, here + 3), None]
