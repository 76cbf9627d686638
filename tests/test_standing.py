"""A summary is shown only while it stands on what is there: no run ends with the table of an earlier one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from run_claims import claimed

from traceproof.digests import digest_file
from traceproof.errors import TraceproofError
from traceproof.pipeline.records import OpTypePlan
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.pipeline.stages.report import report
from traceproof.pipeline.stages.standing import changed, read_summary, settle
from traceproof.store import read_sealed, write_sealed

AHEAD = 7 * 24 * 3600.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder whose summary stands on a plan, two manifests and verdicts."""
    files = {
        "cases/gemm.json": plan_of("gemm"),
        "cases/rope.json": plan_of("rope"),
        "actors/gemm/oracle.json": "{}",
        "actors/gemm/reference.json": "{}",
        "verdicts/gemm.jsonl": "",
        "verdicts/rope.jsonl": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    report(sorted((tmp_path / "verdicts").iterdir()), tmp_path / "summary.json", known=None)
    return tmp_path


def test_a_summary_of_what_is_there_is_shown_and_left_alone(run: Path) -> None:
    assert settle(run, Path(), "") == []
    assert "groups" in read_summary(run / "summary.json", run)


@pytest.mark.parametrize("name", ["cases/gemm.json", "actors/gemm/reference.json", "verdicts/gemm.jsonl"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_summary_that_stands_on_something_else_is_refused_and_removed(run: Path, name: str, gone: bool) -> None:  # noqa: FBT001 - a parameter of the test
    if gone:
        (run / name).unlink()
    else:
        (run / name).write_text('{"other": 1}', encoding="utf-8")
    with pytest.raises(TraceproofError, match=name):
        read_summary(run / "summary.json", run)
    removed = settle(run, Path(), "")
    assert {"summary.json", "verdicts/gemm.jsonl"} <= set(removed)
    assert not (run / "summary.json").exists()
    assert not (run / "verdicts" / "gemm.jsonl").exists()
    assert (run / "verdicts" / "rope.jsonl").exists()
    assert (run / "cases").exists() is not name.startswith("cases/")


def test_what_nobody_wrote_to_is_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(path: Path) -> str:
        read.append(path.name)
        return digest_file(path)

    monkeypatch.setattr("traceproof.pipeline.stages.standing.digest_file", noted)
    assert settle(run, Path(), "") == []
    assert read == []
    path = run / "verdicts" / "gemm.jsonl"
    times = path.stat()
    path.write_text("\n", encoding="utf-8")
    path.write_text("", encoding="utf-8")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "groups" in read_summary(run / "summary.json", run)
    assert read == ["gemm.jsonl"]
    assert changed(run, read_sealed(run / "summary.json")) == []
    assert len(read) > 6  # who reads the files next has all of them checked


@pytest.mark.parametrize("text", ["", '{"verified": tr', "[]", "null", '{"stands_on": []}'])
def test_a_summary_that_is_cut_short_is_an_error_and_no_traceback(run: Path, text: str) -> None:
    (run / "summary.json").write_text(text, encoding="utf-8")
    with pytest.raises(TraceproofError, match=r"summary\.json"):
        read_summary(run / "summary.json", run)
    assert settle(run, Path(), "") == ["summary.json"]
    assert not (run / "summary.json").exists()


@pytest.mark.parametrize("place", range(5, 400, 37))
def test_a_summary_with_a_flipped_bit_is_not_believed(run: Path, place: int) -> None:
    data = bytearray((run / "summary.json").read_bytes())
    data[place] ^= 1
    (run / "summary.json").write_bytes(data)
    with pytest.raises(TraceproofError, match=r"summary\.json"):
        read_summary(run / "summary.json", run)
    assert settle(run, Path(), "") == ["summary.json"]


def test_a_plan_that_is_cut_short_is_made_again(run: Path) -> None:
    (run / "summary.json").unlink()
    (run / "cases" / "gemm.json").write_text('{"op_type": "ge', encoding="utf-8")
    settle(run, Path(), "")
    assert not (run / "cases").exists()


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"stack": "torch", "digest": "x"}', '{"seal": "0", "stack": "torch"}', "\x00"]
)
def test_a_stacks_record_that_is_not_what_was_written_is_made_again(
    run: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["torch.json", "fla.json", "fla/gdn.json", "fla/rope.json", "fla/dependencies.json"]
    for name in names:
        write_sealed(run / "stacks" / name, {"stack": name, "digest": "d"})
    assert settle(run, Path(), "") == []
    for name in ("torch.json", "fla/gdn.json"):
        (run / "stacks" / name).write_text(damage, encoding="utf-8")
    assert settle(run, Path(), "") == ["stacks/fla/gdn.json", "stacks/torch.json"]
    assert "torch.json is removed and will be made again" in capsys.readouterr().err
    assert [name for name in names if (run / "stacks" / name).exists()] == ["fla.json", "fla/rope.json"]


@pytest.mark.parametrize(("reason", "stays"), [("crash", False), ("exception", True)])
def test_a_case_whose_process_was_lost_is_run_again(run: Path, *, reason: str, stays: bool) -> None:
    records = {"small-0": RunRecord(key="0" * 32, status="error", reason=reason, message="a crash?")}
    manifest = run / "actors" / "gemm" / "reference.json"
    cases = {"alpha": records}
    Manifest(actor="reference", op_type="gemm", code="0", environment={}, cases=cases).write(manifest)
    report(sorted((run / "verdicts").iterdir()), run / "summary.json", known=None)
    removed = settle(run, Path(), "")
    assert manifest.exists() is stays
    assert ("verdicts/gemm.jsonl" in removed) is not stays


def test_files_dated_ahead_are_dated_now(run: Path) -> None:
    ahead = time.time() + AHEAD
    for path in (run / "verdicts" / "gemm.jsonl", run / "summary.json", run / "cases"):
        os.utime(path, (ahead, ahead))
    settle(run, Path(), "")
    assert not [path for path in run.rglob("*") if path.stat().st_mtime > time.time()]


def test_another_runs_files_are_left_alone_while_it_runs(run: Path) -> None:
    (run / "verdicts" / "gemm.jsonl").unlink()
    with claimed(run, "", "e") as other:
        assert settle(run, Path(), "") == []
        assert changed(run, json.loads((run / "summary.json").read_text(encoding="utf-8")))
        other.kill()
    assert settle(run, Path(), "") != []


def plan_of(op_type: str) -> str:
    return OpTypePlan(op_type=op_type, dataset="", definitions={}, broken=()).as_text()
