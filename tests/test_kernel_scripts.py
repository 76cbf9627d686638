"""Known bugs are refused as solutions, and what compute-sanitizer finds is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sanitize

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TESTS = Path(__file__).parent / "dataset"


SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
shift 4
"$@"
grep -q "eps" {kernel} && echo "========= ERROR SUMMARY: 0 errors" && exit 0
echo "========= Invalid __global__ write of size 2 bytes"
echo "========= ERROR SUMMARY: 1 error"
exit 42
"""


@pytest.mark.parametrize(("text", "code"), [("eps = 1e-5", 0), ("", 1)])
def test_what_compute_sanitizer_finds_is_told(text: str, code: int, tmp_path: Path) -> None:
    kernel, program = tmp_path / "kernel.py", tmp_path / "compute-sanitizer"
    kernel.write_text(f"{text}\n\n\ndef run(hidden_states, weight):\n    return hidden_states\n", encoding="utf-8")
    program.write_text(SANITIZER.format(kernel=kernel), encoding="utf-8")
    program.chmod(0o755)
    script = Path(sanitize.__file__)
    command = [sys.executable, str(script), str(kernel), "--definition", "rmsnorm_h96", "--dataset", str(TESTS)]
    command += ["--sanitizer", str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    assert f"6 calls, memcheck: ERROR SUMMARY: {code} error" in ran.stdout
    assert ("Invalid __global__ write" in ran.stdout) == bool(code)
