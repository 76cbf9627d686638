"""Room in the store: what goes, what stays, and what is told before it is filled."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from definitions import HIDDEN, rmsnorm
from repository import DEFINITIONS, Repository
from run_claims import claimed

from traceproof.cli import main
from traceproof.errors import TraceproofError
from traceproof.ops.cases import Case
from traceproof.pipeline.records import OpTypePlan, PlannedCase, PlannedDefinition, SkipNote
from traceproof.pipeline.stages import volume
from traceproof.reasons import Skip

NEEDED, GONE, HALF = "aa" + "1" * 30, "bb" + "2" * 30, "cc" + "3" * 30
DAY = 86400.0


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder whose run needs one of three objects, all of them ten days old."""
    repository = Repository.copy(tmp_path, dataset={"path": str(DEFINITIONS.parent)})
    monkeypatch.chdir(repository.root)
    found = repository.root / "results"
    for key in (NEEDED, GONE, HALF):
        folder = found / "store" / "outputs" / key[:2]
        folder.mkdir(parents=True)
        (folder / f"{key}.safetensors").write_bytes(bytes(5000))
        if key != HALF:
            (folder / f"{key}.json").write_text("{}")
    (found / "store" / "judged" / "dd").mkdir(parents=True)
    (found / "store" / "judged" / "dd" / f"{'d' * 32}.json").write_text("{}")
    (found / "store" / "scratch-x").mkdir()
    (found / "store" / "scratch-x" / "left").write_bytes(bytes(9000))
    manifest = found / "selections" / "a" / "actors" / "gemm" / "reference.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"cases": {"d": {"small-0": {"key": NEEDED}, "small-1": {"key": None}}}}))
    for path in (found / "store").rglob("*"):
        os.utime(path, (time.time() - 10 * DAY,) * 2)
    return found


def cleaned(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["clean", *options])
    said = capsys.readouterr()
    assert caught.value.code == code, said
    return said.out + said.err


def objects(results: Path) -> set[str]:
    return {path.stem[:2] for path in (results / "store").glob("*/??/*")}


def test_what_no_run_refers_to_goes_and_what_one_needs_stays(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = cleaned(capsys, "--unreachable", "--dry-run")
    assert "3 objects" in said
    assert "would be removed" in said
    assert objects(results) == {"aa", "bb", "cc", "dd"}
    assert cleaned(capsys, "--unreachable").replace("removed", "would be removed") == said
    assert objects(results) == {"aa", "dd"}
    assert not (results / "store" / "scratch-x").exists()
    assert "0 objects, 0 bytes" in cleaned(capsys, "--unreachable")


def test_what_is_old_goes_whoever_needs_it(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 objects" in cleaned(capsys, "--older-than", "11")
    assert "4 objects" in cleaned(capsys, "--older-than", "9")
    assert objects(results) == set()


def test_what_was_just_written_may_be_a_jobs(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (results / "store" / "outputs" / "bb").iterdir():
        os.utime(path)
    cleaned(capsys, "--unreachable")
    assert objects(results) == {"aa", "bb", "dd"}


def test_nothing_goes_beside_a_run(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claimed(results, "", "e") as other:
        assert f"process {other.pid}" in cleaned(capsys, "--unreachable", code=2)
        other.kill()
    assert objects(results) == {"aa", "bb", "cc", "dd"}
    assert "nothing says what may go" in cleaned(capsys, code=2)


def plan_of(folder: Path, rows: int) -> Path:
    case = PlannedCase(
        case=Case("small-0", "small", {"batch_size": rows}, 0),
        digest="",
        memory=0,
        trials=0,
        skip=None,
        large=False,
        nonce=0,
    )
    skipped = case.model_copy(update={"skip": SkipNote(reason=Skip.DOES_NOT_FIT, message="")})
    entry = PlannedDefinition(
        path="", digest="", no_oracle=None, nonce=0, definition=rmsnorm("a"), cases=(case, skipped)
    )
    path = folder / "rmsnorm.json"
    path.write_text(OpTypePlan(op_type="rmsnorm", dataset="", definitions={"a": entry}, broken=()).as_text())
    return path


def test_a_run_that_may_write_much_says_so_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume.check([plan_of(tmp_path, 7)], tmp_path / "store", actors=3, limit_gb=None)
    assert capsys.readouterr().err == ""
    volume.check([plan_of(tmp_path, 2**30 // HIDDEN)], tmp_path / "store", actors=3, limit_gb=None)
    said = capsys.readouterr().err
    assert "This run may write up to 22.0 GiB of outputs" in said  # 2**30 elements of 3 * 2 and 16 bytes
    assert "traceproof clean" in said


def test_a_store_past_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a.safetensors").write_bytes(bytes(2**20))
    plans = [plan_of(tmp_path, 2**20 // HIDDEN)]  # 22 MiB
    volume.check(plans, tmp_path / "store", actors=3, limit_gb=24 / 1024)
    with pytest.raises(TraceproofError, match=r"limits\.store_gb is 0\.0"):
        volume.check(plans, tmp_path / "store", actors=3, limit_gb=22 / 1024)
