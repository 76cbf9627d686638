"""Compiler caches of isolated workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from traceproof.run import runner
from traceproof.run.untrusted import untrusted_pool

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
PACKAGE = "SOME_PACKAGE_WORKSPACE_BASE"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shared"
    whole, partial = folder / "WHOLE", folder / "PARTIAL"
    for kernel in (whole, partial):
        kernel.mkdir(parents=True)
        (kernel / "kernel.cubin").write_bytes(b"machine code")
    (whole / "__grp__kernel.json").write_text("{}")
    monkeypatch.setenv(runner.TRITON, str(folder))
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "inductor"))
    monkeypatch.setenv(PACKAGE, str(tmp_path / "package"))
    return folder


def test_a_worker_compiles_below_its_scratch_folder(shared: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    runner.use_own(scratch)
    for name in (runner.TRITON, INDUCTOR, PACKAGE):
        own = Path(os.environ[name])
        assert own.is_relative_to(scratch)
        (own / "NEW").mkdir()
    assert sorted(path.name for path in shared.iterdir()) == ["PARTIAL", "WHOLE"]


def test_whole_kernels_of_trusted_code_are_found_and_partial_ones_are_not(shared: Path, tmp_path: Path) -> None:
    runner.use_own(tmp_path / "scratch")
    own = Path(os.environ[runner.TRITON])
    assert (own / "WHOLE" / "kernel.cubin").read_bytes() == b"machine code"
    assert not (own / "PARTIAL").exists()
    assert [*untrusted_pool(environment={runner.TRITON: str(shared)}).readable] == [shared]


def test_a_worker_without_compilers_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(runner.PLACES.search, list(os.environ)):
        monkeypatch.delenv(name)
    runner.use_own(tmp_path)
    assert not list(tmp_path.iterdir())
    assert [*untrusted_pool().readable] == []
