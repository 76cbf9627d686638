"""Timing suites: a file that is stopped still says what it did, and the result grows with each file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "lab" / "time_suites.py"
ENDS = """
import os
import pytest

def test_passes():
    assert os.environ["OMP_NUM_THREADS"] == "3"

def test_fails():
    assert [1] == [2]

def test_skips():
    pytest.skip("no_cuda: there is none")

@pytest.fixture
def broken():
    raise OSError("broken")

def test_breaks(broken):
    pass
"""
HANGS = """
import pathlib
import subprocess

def test_passes():
    pass

def test_hangs():
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(__file__).with_suffix(".pid").write_text(str(child.pid))
    child.wait()

def test_is_left():
    pass
"""


def run(root: Path, *options: str, **files: str) -> dict[str, Any]:
    """The result over a suite of the given files, and rows by file."""
    suite = root / "suite"
    suite.mkdir()
    for name, text in files.items():
        (suite / f"test_{name}.py").write_text(text)
    out = root / "out.json"
    command = [sys.executable, str(SCRIPT), "--dataset", str(root), "--no-own", "--suite", str(suite)]
    places = [str(SCRIPT.parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command += ["--threads", "3", "--out", str(out), *options]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100)
    result: dict[str, Any] = json.loads(out.read_text())[0]
    return result | {"suite_folder": suite, "rows": {row["file"]: row for row in result["rows"]}}


def runs(process: str) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for has no command line."""
    try:
        return bool(Path("/proc", process, "cmdline").read_bytes())
    except OSError:
        return False


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("suites")
    broken = "import no_such_package\n"
    return run(root, "--jobs=3", "--seconds=8", "--durations=2", ends=ENDS, hangs=HANGS, broken=broken)


def test_a_file_that_ends_says_what_passed_failed_was_skipped_and_broke(result: dict[str, Any]) -> None:
    row = result["rows"]["test_ends.py"]
    assert row["outcomes"] == {"passed": 1, "failure": 1, "skipped": 1, "error": 1}
    assert row["skips"] == {"no_cuda": 1}
    assert {bad["test"] for bad in row["failed"]} == {"test_fails", "test_breaks"}
    assert "[1] == [2]" in row["failed"][0]["message"]
    assert len(row["slowest"]) == 2
    assert (row["left"], row["stopped_in"]) == (0, None)
    assert row["said"].startswith("exit 1")


def test_a_file_that_is_stopped_says_what_passed_and_where_it_was(result: dict[str, Any]) -> None:
    row = result["rows"]["test_hangs.py"]
    assert row["outcomes"] == {"passed": 1}
    assert (row["left"], row["stopped_in"], row["said"]) == (2, "test_hangs", "not done after 8 s")
    assert not runs((result["suite_folder"] / "test_hangs.pid").read_text())  # what it started is ended too


def test_a_file_that_can_not_be_collected_is_an_error(result: dict[str, Any]) -> None:
    assert result["rows"]["test_broken.py"]["outcomes"] == {"error": 1}


def test_the_total_is_the_sum(result: dict[str, Any]) -> None:
    assert result["files"] == 3
    assert result["outcomes"] == {"passed": 2, "failure": 1, "skipped": 1, "error": 2}


def test_what_the_total_limit_leaves_no_time_for_is_said(tmp_path: Path) -> None:
    started = time.monotonic()
    found = run(tmp_path, "--jobs=1", "--total=3", a=HANGS, b=ENDS)
    assert time.monotonic() - started < 30
    assert found["rows"]["test_b.py"]["said"] == "not started"
