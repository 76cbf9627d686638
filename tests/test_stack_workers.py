"""What a stack's workers find imported, and how far they stand back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worker_pools import KINDS, SOURCES, TESTS

from traceproof.execution.caller import CUDA_REFUSES
from traceproof.pipeline.stages.stack_workers import COMPILER, PRELOAD, StackWorkers
from traceproof.worker import Limits, Pool
from traceproof.worker.model import NICE


def stack_workers(name: str, device: str) -> StackWorkers:
    record = {"stack": name, "device_type": device, "digest": "0" * 32}
    return StackWorkers.of(Path("compiled"), record)


def test_what_takes_long_to_import_is_imported_once_where_a_gpu_is() -> None:
    for name in ("sglang", "fla"):
        assert stack_workers(name, "cuda").preload == (*PRELOAD, *COMPILER)
        assert stack_workers(name, "cpu").preload == PRELOAD
    assert stack_workers("torch", "cuda").preload == PRELOAD


@pytest.mark.slow
def test_what_is_imported_ahead_starts_no_thread() -> None:
    code = f"import os\nfor name in {COMPILER}:\n __import__(name)\nprint(len(os.listdir('/proc/self/task')))"
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=alone)
    assert done.stdout.split() == ["1"]


def test_references_stand_back_for_imports() -> None:
    told = {name: int(stack_workers(name, "cuda").environment[NICE]) for name in ("torch", "sglang", "fla")}
    assert told["torch"] > told["sglang"] == told["fla"] == 0
    assert NICE not in stack_workers("torch", "cpu").environment


def test_references_go_before_the_trusted_code_of_their_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        "traceproof.pipeline.stages.stack_workers.Pool", lambda **given: asked.append(NICE in given["env"])
    )
    stack_workers("torch", "cuda").pool()
    stack_workers("torch", "cuda").untrusted(conceal=[])
    assert asked == [True, False]


def test_no_worker_that_gets_a_gpu_is_behind_what_cuda_does_not_start_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        "traceproof.pipeline.stages.stack_workers.Pool", lambda **given: asked.append(given["without"])
    )
    for device in ("cuda", "cpu"):
        stack_workers("torch", device).pool()
        stack_workers("torch", device).untrusted(conceal=[])
    assert asked == [CUDA_REFUSES, CUDA_REFUSES, (), ()]


@pytest.mark.parametrize("kind", ["trusted", "untrusted"])
def test_workers_stand_back_as_their_interpreter_is_told(kind: str) -> None:
    isolation, without = KINDS[kind]
    path = os.pathsep.join([str(SOURCES), str(TESTS)])
    here = os.nice(0)
    with Pool(preload=(), env={"PYTHONPATH": path, NICE: "3"}, without=without) as pool:
        (outcome,) = pool.run_items(
            setup="worker_misdeeds:setup",
            payload=None,
            items=[{"do": "stand"}],
            limits=Limits(seconds=20),
            isolation=isolation,
        )
    assert outcome.value == [min(19, here + 3), None]
