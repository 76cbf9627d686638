"""Scripts of the lab: suites scored by planted bugs, known bugs as solutions, and what compute-sanitizer finds."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from definitions import GOOD, rmsnorm, write

import sanitize
from scorecard import Card, Suite, existing, generated, score, table
from traceproof.dataset.tree import read_tree
from traceproof.testgen.generate import PLACE, Divergences, GenerateOptions, generate

NAME = "rmsnorm_a"
MOST = 2
CHECK = """
def inputs():
    torch.manual_seed(0)
    return 1e-3 * torch.randn(8, 32).bfloat16(), torch.randn(32).bfloat16()

def right(x, w):
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()

def test_correctness():
    x, w = inputs()
    close = torch.allclose(run(x, w).double(), right(x, w), atol=1e-2, rtol=1e-2)
"""


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def dataset(root: Path, test: str = "") -> Path:
    write(root, rmsnorm(NAME))
    if test:
        path = root / PLACE / f"test_{NAME}.py"
        path.parent.mkdir(parents=True)
        path.write_text(GOOD + test)
    return root


def card(root: Path, suite: Suite, seeds: int = 1) -> Card:
    entry = read_tree(root).definitions[NAME]
    return score(suite, entry.path, entry.definition, seeds=seeds, most=MOST)


@pytest.mark.parametrize(
    ("end", "killed", "denied"),
    [
        ("    assert close\n", True, False),
        ("    return close\n", False, True),
        ("    assert len(x)\n", False, False),
    ],
    ids=["asserts", "returns", "looks at shapes"],
)
def test_a_suite_is_scored_by_what_it_asserts(tmp_path: Path, end: str, *, killed: bool, denied: bool) -> None:
    root = dataset(tmp_path, CHECK + end)
    found = card(root, Suite(root, partial(existing, root=root)))
    assert found.tests == 1
    assert found.total
    assert (found.killed > 0, found.denied > 0) == (killed, denied)
    assert found.killed + len(found.survivors) == found.total
    assert (root / PLACE / f"test_{NAME}.py").read_text() == GOOD + CHECK + end  # as before


def test_our_suite_kills(tmp_path: Path) -> None:
    root = dataset(tmp_path)
    generate(GenerateOptions(root=root, everything=True, sizes=("small",)), Divergences())
    found = card(root, Suite(root, generated, ("--seed={seed}", "--test-sizes=small")), seeds=2)
    assert (found.seeds, found.alarms) == (2, [])
    assert found.killed == found.total > 0
    assert "100.0%" in table([found])


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
