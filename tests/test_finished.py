"""A job that runs again takes what it left from its own manifest, and finds out what is not as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from definitions import rmsnorm, write
from pipeline import STACK, sharing

from traceproof.pipeline.records import EARLIER
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.actor import run
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.pipeline.stages.plan import plan
from traceproof.pipeline.stages.plan_selection import Selection
from traceproof.store import Store
from traceproof.worker import Limits, Pool

JOB = Job(actor="torch", code="0", stack=STACK, threads=1, limits=Limits(seconds=20.0, memory_bytes=2 << 30))
CASES = {"small-0", "small-1", "edge-empty"}


@pytest.fixture(scope="module", autouse=True)
def in_a_run() -> Iterator[None]:
    with sharing():
        yield


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Of two definitions, as the first job left it."""
    for name in ("alpha", "beta"):
        write(tmp_path / "dataset", rmsnorm(name))
    return made(tmp_path / "torch.json")


def made(path: Path, job: Job = JOB) -> Path:
    """What a job writes, as Snakemake starts it: what it is to write has been removed."""
    path.unlink(missing_ok=True)
    selection = Selection(sizes=("small",), cases=tuple(CASES))
    [cases] = plan(path.parent / "dataset", path.parent / "cases", selection)
    run(cases, path, path.parent / "store", job)
    return path


class _Reads:
    """Keys of the records that were read of the store, and the setups that workers were asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        self.setups: list[str] = []
        record, session = Store.record, Pool.session

        def read(store: Store, digest: str) -> object:
            self.keys.append(digest)
            return record(store, digest)

        def asked(pool: Pool, **given: str) -> object:
            self.setups.append(given["setup"])
            return session(pool, **given)  # type: ignore[arg-type]

        patch.setattr(Store, "record", read)
        patch.setattr(Pool, "session", asked)


def keys(path: Path, *names: str) -> set[str]:
    cases = Manifest.read(path).cases
    return {str(record.key) for name in names or cases for record in cases[name].values()}


@pytest.mark.parametrize("actor", ["torch", "reference", "flashinfer"])  # the last one skips on a CPU
def test_nothing_is_read_or_run_that_stands(tmp_path: Path, actor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alpha", "beta"):
        write(tmp_path / "dataset", rmsnorm(name))
    job = replace(JOB, actor=actor)
    path = made(tmp_path / f"{actor}.json", job)
    before, found = path.read_bytes(), _Reads(monkeypatch)
    assert made(path, job).read_bytes() == before
    assert (found.keys, found.setups) == ([], [])
    write(tmp_path / "dataset", rmsnorm("beta", rmsnorm("beta")["reference"] + "\n# edited\n"))
    made(path, job)
    assert set(found.keys) <= keys(path, "beta")
    assert found.setups


@pytest.mark.parametrize("what", ["tensors", "record", "no tensors", "no record", "a link"])
def test_what_is_not_as_it_was_is_run_again(
    manifest: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Manifest.read(manifest)
    key = str(before.cases["alpha"]["small-0"].key)
    store = Store(manifest.parent / "store", "outputs")
    path = store.record_path(key) if "record" in what else store.tensors_path(key)
    whole, times = path.read_bytes(), path.stat()
    if what == "a link":
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved"))
    elif what.startswith("no"):
        path.unlink()
    else:
        path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    found = _Reads(monkeypatch)
    after = Manifest.read(made(manifest))
    assert found.setups
    assert set(found.keys) == {key}
    assert ("is dropped and will be computed again" in capsys.readouterr().err) is (what != "no record")
    assert path.read_bytes() == whole or "record" in what  # it has times of its own
    assert after.cases["alpha"]["small-0"].tensors == before.cases["alpha"]["small-0"].tensors
    assert after.cases["beta"] == before.cases["beta"]


@pytest.mark.parametrize("damage", ["", "[]", '{"seal": "0"}'])
def test_a_damaged_manifest_is_not_believed(manifest: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (manifest.parent / EARLIER / manifest.name).write_text(damage, encoding="utf-8")
    found = _Reads(monkeypatch)
    made(manifest)
    assert set(found.keys) == keys(manifest)
    assert found.setups == []


def test_timeouts_and_what_force_says_are_run_again(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Manifest.read(manifest)
    late = RunRecord(key=before.cases["alpha"]["small-0"].key, status="error", reason="timeout")
    cases = {**before.cases, "alpha": {**before.cases["alpha"], "small-0": late}}
    store = Store(manifest.parent / "store", "outputs")
    store.record_path(str(late.key)).unlink()
    before.model_copy(update={"cases": cases}).write(manifest)
    found = _Reads(monkeypatch)
    assert Manifest.read(made(manifest)).cases["alpha"]["small-0"].status == "ok"
    assert len(found.setups) == 1
    made(manifest, replace(JOB, force=True))
    assert len(found.setups) == 2


def test_outputs_of_weak_isolation_are_not_those_of_a_strict_run(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Manifest.read(manifest)
    weak = before.cases["alpha"]["small-0"].model_copy(update={"isolation": "the network"})
    cases = {**before.cases, "alpha": {**before.cases["alpha"], "small-0": weak}}
    before.model_copy(update={"cases": cases}).write(manifest)
    assert Manifest.read(made(manifest, replace(JOB, weak_isolation=True))).cases == cases
    found = _Reads(monkeypatch)
    made(manifest)
    assert found.setups


def test_a_file_system_without_links_has_a_copy(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    found = _Reads(monkeypatch)
    made(made(manifest))
    assert found.setups == []
    assert (manifest.parent / EARLIER / manifest.name).stat().st_nlink == 1
