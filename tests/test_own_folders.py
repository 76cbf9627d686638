"""What a killed process left goes, and what a living one uses stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from traceproof.files import own_folder, sweep

MAKES = """
import sys, pathlib
from traceproof.files import own_folder
with own_folder(sys.argv[1], pathlib.Path(sys.argv[2])) as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A folder whose process was killed, with a file in it that resists removal."""
    command = [sys.executable, "-c", MAKES, "scratch", str(tmp_path)]
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


def test_a_killed_processs_folder_goes_and_a_living_ones_stays(killed: Path, tmp_path: Path) -> None:
    with own_folder("scratch", tmp_path) as mine:
        sweep(tmp_path)
        assert mine.is_dir()
        assert not killed.exists()
    assert not mine.exists()


@pytest.mark.parametrize("name", ["scratch-x", "traceproof-x", "scratch-1.2-x", "other-1-x", "a-b"])
def test_what_no_process_of_ours_made_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert (tmp_path / name).is_dir()


def test_a_link_in_the_place_of_a_folder_leads_nowhere(killed: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "kept").touch()
    link = killed.with_name(killed.name + "_link")
    link.symlink_to(beside)
    sweep(tmp_path)
    assert (beside / "kept").exists()
