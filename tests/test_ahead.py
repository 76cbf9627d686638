"""What the first jobs of a forced run wait for is started ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worker_pools import SOURCES

from traceproof.cli import run
from traceproof.owner import Owner
from traceproof.pipeline import ahead
from traceproof.worker.shared import RUN, run_folder

RECORD = {"stack": "cpu", "device_type": "cpu", "digest": "0" * 32}


def test_interpreters_and_the_job_server_are_there_before_a_job(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps(RECORD), encoding="utf-8")
    with subprocess.Popen(["sleep", "60"]) as owner:
        run = Owner.of(owner.pid).text
        environment = os.environ | {RUN: run, "PYTHONPATH": str(SOURCES)}
        command = [
            sys.executable,
            "-m",
            ahead.__name__,
            str(record),
            str(tmp_path),
            ahead.TRUSTED,
            ahead.UNTRUSTED,
        ]
        subprocess.run(command, check=True, env=environment)
        sockets = sorted(path.parent.name for path in run_folder(run).glob("*/socket"))
        owner.kill()
    assert sum(name.startswith("jobs-") for name in sockets) == 1
    assert len(sockets) == 3  # for strangers' code, for our own, and the job server
    deadline = time.monotonic() + 30
    while run_folder(run).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not run_folder(run).exists()


def test_a_stack_that_no_run_has_recorded_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: begun.append(command))
    (tmp_path / "torch.json").touch()
    sources = SimpleNamespace(record=lambda stack, _: f"{stack}.json", path=str)
    flow: Any = SimpleNamespace(
        actors=("reference", "torch", "fla"),
        root=tmp_path,
        sources=sources,
        caches="compiled",
        op_types=lambda: ["gemm"],
        python=lambda stack: f"{stack}/bin/python",
    )
    ahead.start(flow)
    (command,) = begun
    assert command[0] == "torch/bin/python"
    assert command[-4:] == [str(tmp_path / "torch.json"), "compiled", "trusted", "untrusted"]


def test_a_command_starts_it_before_snakemake_which_then_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Mapping[str, str]] = []
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(ahead, "start", lambda _, environment: told.append(environment))

    def supervise(_: object, *, env: Mapping[str, str], **__: object) -> int:
        told.append(env)
        return 0

    monkeypatch.setattr(run, "supervise", supervise)
    flow: Any = SimpleNamespace(on_gpu=True)
    assert run.snakemake(tmp_path, {}, cores=1, forced=flow) == run.FINE
    started, snakemakes = told
    assert started[RUN] == snakemakes[RUN]
    assert "HF_TOKEN" not in started
    assert snakemakes[ahead.STARTED]
    assert run.snakemake(tmp_path, {}, cores=1) == run.FINE
    assert ahead.STARTED not in told[2]
