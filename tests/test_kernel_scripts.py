"""Known bugs are refused as solutions, and what compute-sanitizer finds is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import known_bugs
import sanitize
from known_bugs import ABSENT, ACCEPTED, REFUSED
from traceproof.ops.answers import answers_of
from traceproof.solutions.trial import planned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TESTS = Path(__file__).parent / "dataset"


def test_a_known_bug_is_refused_as_a_solution_and_a_right_way_is_accepted() -> None:
    given = known_bugs.settings(TESTS, 5)
    definition, cases = planned("rmsnorm_h96", given)
    found = answers_of("rmsnorm")
    assert found is not None
    dropped = next(one for one in found.wrong if one.name == "weight dropped")
    absent = next(one for one in found.wrong if one.name == "residual dropped")
    with known_bugs.pool(gpu=False) as workers:
        outcomes = [
            known_bugs._judged(definition, cases, one, given, workers, wrong=wrong, subjects={}).outcome
            for one, wrong in ((found.right[0], False), (dropped, True), (absent, True))
        ]
    assert outcomes == [ACCEPTED, REFUSED, ABSENT]


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
