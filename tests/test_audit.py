"""The audit finds every planted fault of a test, and none in a test that is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from definitions import GOOD, rmsnorm, write

from traceproof.audit import audit
from traceproof.errors import TraceproofError

RIGHT = """
import json
import torch

def load_definition(name):
    raise LookupError(name)

def make_inputs(batch_size, device="cpu"):
    return {"hidden_states": torch.randn(batch_size, 32), "weight": torch.randn(32)}

def test_right():
    torch.manual_seed(0)
    reference = load_definition("rmsnorm_a")
    inputs = make_inputs(4)
    torch.testing.assert_close(reference(**inputs), inputs["hidden_states"], atol=1e-3, rtol=1e-3)
"""
SCRIPT = 'def test_a():\n    assert f() == 1\n\nif __name__ == "__main__":\n    '
PLANTED = [
    ("TA000", "def test(:"),
    ("TA101", "def test_a():\n    print(1)\n"),
    ("TA102", "def test_a():\n    return 1 == 2\n"),
    ("TA103", "def test_a():\n    try:\n        assert f() == 1\n    except Exception as e:\n        print(e)\n"),
    ("TA104", "def main():\n    try:\n        f()\n    except Exception:\n        print(1)\n"),
    ("TA105", "def test_a():\n    if not torch.cuda.is_available():\n        return\n    assert f() == 1\n"),
    ("TA106", "def test_a():\n    out = f()\n    assert out.shape == (2, 3)\n    assert not out.isnan().any()\n"),
    ("TA203", 'def test_a():\n    assert load_definition("rmsnorm_z").x == 1\n'),
    ("TA302", "def inputs():\n    return torch.randn(3)\n\ndef test_a():\n    assert close(f(inputs()))\n"),
    ("TA303", "def test_a():\n    kv_indices = torch.arange(7)\n    assert close(f(kv_indices))\n"),
    # An assertion of a helper about its arguments is none about an output.
    ("TA101", "def half(x):\n    assert x.dim() == 2\n    return x\n\ndef test_a():\n    print(half(1))\n"),
    ("TA102", "def test_a():\n    print(f())\n    return True\n"),
    ("TA104", f"{SCRIPT}pytest.main(sys.argv)\n"),  # drops the exit status
]
PERMUTED = "pages = torch.randperm(7)\n    kv_indices = pages[:3]\n    page_ids = torch.arange(3)"
INNOCENT = [
    ("TA101", "def check(x):\n    assert x == 1\n\ndef test_a():\n    check(f())\n"),
    ("TA102", "def test_a():\n    assert f() == 1\n    return True\n"),
    ("TA104", f"{SCRIPT}sys.exit(pytest.main(sys.argv))\n"),
    ("TA303", f"def test_a():\n    {PERMUTED}"),
]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    write(tmp_path, rmsnorm("rmsnorm_a"))
    return tmp_path


def codes(dataset: Path, text: str, name: str = "test_x.py") -> list[str]:
    folder = dataset / "tests"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return [finding.code for finding in audit(folder, dataset).findings]


def test_a_right_file_has_no_findings(dataset: Path) -> None:
    assert codes(dataset, RIGHT) == []


@pytest.mark.parametrize(("code", "text"), PLANTED)
def test_a_planted_fault_is_found(dataset: Path, code: str, text: str) -> None:
    assert code in codes(dataset, text)


@pytest.mark.parametrize(("code", "text"), INNOCENT)
def test_what_looks_like_a_fault_is_none(dataset: Path, code: str, text: str) -> None:
    assert code not in codes(dataset, text)


def test_a_copy_of_the_reference_is_told_from_one_that_differs(dataset: Path) -> None:
    test = "\ndef test_a():\n    torch.manual_seed(0)\n    assert close(run(1, 2))\n"
    assert codes(dataset, GOOD + test, "test_rmsnorm_a.py") == ["TA201"]
    assert codes(dataset, GOOD.replace("1e-6", "1e-5") + test, "test_rmsnorm_a.py") == ["TA202"]
    (dataset / "tests" / "test_rmsnorm_a.py").unlink()
    assert codes(dataset, GOOD + test, "test_layernorm.py") == ["TA204"]


def test_a_folder_without_tests_and_a_folder_that_is_no_dataset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match=r"holds no test_\*.py"):
        audit(tmp_path, tmp_path)
    (tmp_path / "test_x.py").write_text("")
    with pytest.raises(TraceproofError, match="is not a dataset"):
        audit(tmp_path, tmp_path)


def test_the_command_gives_exit_codes(dataset: Path) -> None:
    folder = dataset / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text(RIGHT)
    command = [sys.executable, "-m", "traceproof", "audit-tests", str(folder)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    (folder / "test_x.py").write_text("def test_a():\n    print(1)\n")
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    absent = subprocess.run([*command[:-1], str(folder / "no")], check=False, capture_output=True, text=True)
    assert absent.returncode == 2
    assert "is no folder" in absent.stderr
