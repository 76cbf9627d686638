"""The pytest plugin: a marked test gets its cases; failures tell, skips are typed, and nobody else pays for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """import pytest
import torch


def norm(x, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@pytest.mark.traceproof("rmsnorm", hidden_size=96, sizes=["small"])
@pytest.mark.traceproof("rmsnorm", hidden_size=64, sizes=["small"], cases=["small-0"])
def test_right(case):
    case.check(lambda x, weight: norm(x, weight, 1e-6))


@pytest.mark.traceproof("rmsnorm", hidden_size=96, cases=["adversarial-tiny"])
def test_wrong(case):
    case.check(norm(**{"x": case.inputs["hidden_states"], "weight": case.inputs["weight"]}, eps=1e-5))


@pytest.mark.traceproof("rmsnorm", hidden_size=96, device="cuda", cases=["small-0"])
def test_on_gpu(case):
    case.check(lambda x, weight: norm(x, weight, 1e-6))


def test_unmarked(case):
    pass


@pytest.mark.traceproof("rmsnorm", hidden_size=96, sizes=["small"], isolated=True)
@pytest.mark.parametrize("text", ["hidden_states", "open('x')"])
def test_isolated(case, text, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def run(hidden_states, weight):\\n    return {text}\\n")
    case.check(file)


@pytest.mark.traceproof("rmsnorm", hidden_size=96, isolated=True)
def test_needs_gpu(case, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import triton\\n\\n\\ndef run(hidden_states, weight):\\n    return hidden_states\\n")
    case.check(file)
"""


def ran(folder: Path, *options: str) -> str:
    """What pytest says of the tests in a folder."""
    command = [sys.executable, "-m", "pytest", "-p", "traceproof.pytest_plugin", "-p", "no:cacheprovider", "-rfEs"]
    command += ["--rootdir", str(folder)]
    source = str(Path(__file__).parents[1] / "src")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *options, str(folder)], cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_marked_test_runs_per_case_beside_others_and_tells(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS, encoding="utf-8")
    told = ran(tmp_path, "-n", "1")
    assert "3 failed, 8 passed, 2 skipped, 1 error" in told, told
    for text in (
        "WRONG: outputs for rmsnorm_h96: 1 cases, 1 of 1 results bad",
        "looks like: as with: eps x 10",
        "again: pytest 'test_mine.py::test_wrong[rmsnorm_h96-adversarial-tiny]'",
        "no_cuda: there is no GPU here",
        "WRONG: mine for rmsnorm_h96 on cpu",
        "adversarial-tiny (batch_size=5), output: numerics",
        ", 'rmsnorm', hidden_size=96, sizes=('small',), hidden_seed=",
        "none (), *: refused",
        "mine.py is a triton kernel, which needs a GPU, and this machine has none",
        "test_unmarked has no @pytest.mark.traceproof(...)",
    ):
        assert text in told, told


def test_it_imports_nothing_where_no_test_has_the_mark(tmp_path: Path) -> None:
    names = "{'torch', 'pydantic', 'traceproof.api'}"
    text = f"import sys\n\n\ndef test_nothing():\n    assert not {names} & sys.modules.keys()\n"
    (tmp_path / "test_other.py").write_text(text, encoding="utf-8")
    assert "1 passed" in ran(tmp_path)
