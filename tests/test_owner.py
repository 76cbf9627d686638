"""What a killed process left goes, and what a living one uses stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from traceproof import runs
from traceproof.owner import OWNER_FILE, Owner, new_folder, own_folder, sweep

MAKES = "import sys; from traceproof.owner import new_folder; print(new_folder(*sys.argv[1:]), flush=True); "


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A folder whose process was killed, with a file in it that resists removal."""
    command = [sys.executable, "-c", MAKES + "input()", "scratch", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
        (folder / "inner").chmod(0)
        sweep(tmp_path)
        assert folder.is_dir()
        process.kill()
    return folder


@pytest.fixture
def ended() -> str:
    """A process that has ended, as an owner's text."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        text = Owner.of(process.pid).text
        process.kill()
    return text


def test_a_killed_processs_folder_goes_and_a_living_ones_stays(killed: Path, tmp_path: Path) -> None:
    with own_folder("scratch", tmp_path) as mine:
        sweep(tmp_path)
        assert mine.is_dir()
        assert not killed.exists()
    assert not mine.exists()


def test_what_hosts_of_an_ended_run_share_goes(tmp_path: Path, ended: str) -> None:
    folders = {}
    for number, owner in enumerate([ended, Owner.of(os.getpid()).text]):
        folders[owner] = tmp_path / f"traceproof-{os.getuid()}-{number:012x}"
        (folders[owner] / "key").mkdir(parents=True)
        (folders[owner] / OWNER_FILE).write_text(owner)
    sweep(tmp_path)
    assert [owner == ended for owner, folder in folders.items() if folder.exists()] == [False]


@pytest.mark.parametrize(
    "name", ["scratch-x", "traceproof-x", "scratch-1.2.ffffffffffff-x", "other-1.2.0-x", "a-b"]
)
def test_what_says_no_owner_of_this_machine_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert (tmp_path / name).is_dir()


def test_a_link_in_the_place_of_a_folder_leads_nowhere(killed: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "kept").touch()
    link = killed.with_name(killed.name + "-link")
    link.symlink_to(beside)
    sweep(tmp_path)
    assert (beside / "kept").exists()


def test_a_run_begins_by_removing_what_killed_ones_left(
    tmp_path: Path, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    left = [
        tmp_path / "temporary" / f"traceproof-{ended}-a",
        tmp_path / "results" / "store" / f"scratch-{ended}-b",
    ]
    for folder in left:
        folder.mkdir(parents=True)
    mine = new_folder("scratch", tmp_path / "results" / "store")
    runs.claim(tmp_path / "results", "", environments="e")
    assert not [folder for folder in left if folder.exists()]
    assert mine.is_dir()
