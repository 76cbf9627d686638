"""The audit finds every planted fault of a test, and none in a test that is right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from definitions import GOOD, rmsnorm, write

from traceproof import audit as process
from traceproof.audit import AuditReport, AuditSettings, audit
from traceproof.errors import TraceproofError
from traceproof.lint.model import as_text
from traceproof.sandbox import Pool

pytestmark = pytest.mark.slow
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


def audited(dataset: Path, files: Mapping[str, str], **settings: Any) -> AuditReport:  # noqa: ANN401 - fields
    """The audit of a folder of tests that holds these files."""
    folder = dataset / "tests"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return audit(folder, AuditSettings(dataset=dataset, **settings))


def codes(dataset: Path, text: str, name: str = "test_x.py") -> list[str]:
    return [finding.code for finding in audited(dataset, {name: text}, python=None).findings]


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


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """What an audit runs tests in; these may read what all tests of this file wrote."""
    with process.pool(sys.executable, tmp_path_factory.getbasetemp()) as found:
        yield found


@pytest.fixture
def shared(workers: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits use the workers of the others."""
    monkeypatch.setattr(process, "pool", lambda *_: nullcontext(workers))


@pytest.mark.usefixtures("shared")
def test_running_shows_what_passes_without_comparing(dataset: Path) -> None:
    text = (
        "import no_such_package\nimport torch\n"
        "def test_compares():\n"
        "    assert torch.allclose(torch.ones(1), torch.ones(1))\n"
        "def test_correctness(atol=1e-2):\n"
        "    if not torch.cuda.is_available():\n"
        "        return\n"
        "    assert torch.allclose(no_such_package.kernel(1), torch.ones(1), atol=atol)\n"
    )
    report = audited(dataset, {"test_x.py": text}, python=sys.executable)
    assert {finding.code for finding in report.findings} == {"TA105", "TA107"}, report.not_run
    assert "test_x.py:5:1: TA107" in as_text(report.findings)
    assert report.collected == 2


def test_a_folder_without_tests_and_a_folder_that_is_no_dataset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match=r"holds no test_\*.py"):
        audit(tmp_path, AuditSettings(dataset=tmp_path))
    (tmp_path / "test_x.py").write_text("")
    with pytest.raises(TraceproofError, match="is not a dataset"):
        audit(tmp_path, AuditSettings(dataset=tmp_path))


def test_the_command_gives_exit_codes(dataset: Path) -> None:
    folder = dataset / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text(RIGHT)
    command = [sys.executable, "-m", "traceproof", "audit-tests", str(folder), "--no-run"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    (folder / "test_x.py").write_text("def test_a():\n    print(1)\n")
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    absent = subprocess.run([*command[:-2], str(folder / "no")], check=False, capture_output=True, text=True)
    assert absent.returncode == 2
    assert "is no folder" in absent.stderr


@pytest.mark.usefixtures("shared")
def test_a_file_that_takes_too_long_is_a_finding(dataset: Path) -> None:
    text = "import subprocess\n\ndef test_slow():\n    subprocess.run(['sleep', '600'])\n    assert f() == 1\n"
    said: list[str] = []
    report = audited(dataset, {"test_x.py": text}, python=sys.executable, seconds=10.0, say=said.append)
    assert [(one.code, one.evidence) for one in report.findings] == [("TA109", "not done after 10 s")]
    assert said == ["1/1  test_x.py  running, at most 10 s"]


@pytest.mark.usefixtures("shared")
def test_inherited_tests_are_counted_by_running(dataset: Path) -> None:
    files = {
        "suite.py": "class Suite:\n    def test_a(self):\n        assert 1\n",
        "test_x.py": "from suite import Suite\n\nclass TestOne(Suite):\n    pass\n",
        "test_y.py": "def helper():\n    pass\n",
    }
    report = audited(dataset, files, python=sys.executable)
    assert (report.tests, report.collected) == (0, 1)
    assert [(f.path.name, f.code) for f in report.findings] == [("test_y.py", "TA108")]


@pytest.mark.usefixtures("shared")
def test_tests_that_cannot_be_collected_or_configured_say_why(dataset: Path) -> None:
    test = "def test_a():\n    assert f() == 1\n"
    report = audited(dataset, {"test_x.py": f"import torch.no_such_module\n\n{test}"}, python=sys.executable)
    assert "No module named 'torch.no_such_module'" in report.not_run["test_x.py"]
    hook = "import pytest\n\ndef pytest_configure():\n    raise pytest.UsageError('give the dataset')\n"
    report = audited(dataset, {"test_x.py": test, "conftest.py": hook}, python=sys.executable)
    assert "give the dataset" in report.not_run["test_x.py"]


STEALS = """
import os, pathlib, socket
SEEN = dict(os.environ)
for path in (OUTSIDE, HERE):
    try:
        pathlib.Path(path).write_text(str(SEEN))
    except OSError:
        pass
try:
    SEEN["secret"] = pathlib.Path(SECRET).read_text()
except OSError:
    pass
assert "HF_TOKEN" not in SEEN and "secret" not in SEEN, SEEN
"""


@pytest.mark.parametrize("where", ["test", "conftest"])
def test_what_an_audit_runs_is_shut_in(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("mine")
    steals = STEALS.replace("OUTSIDE", repr(str(outside / "stolen"))).replace(
        "SECRET", repr(str(outside / "secret"))
    )
    stolen = dataset / "tests" / "stolen"
    steals = steals.replace("HERE", repr(str(stolen)))
    files = {"conftest.py": "", "test_x.py": "def test_a():\n    assert f() == 1\n"}
    files["conftest.py" if where == "conftest" else "test_x.py"] += steals
    report = audited(dataset, files, python=sys.executable)
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert not stolen.exists()
    assert report.collected == 1, "its own assertion held: it saw no token and no secret"
