"""An environment that lacks something says what, and tells a missing package from a missing driver."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import stacks as script
from stacks import Imports, check

from traceproof.environments import building as environments

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
RULES = "def chunk_gated_delta_rule(): ...\ndef fused_recurrent_gated_delta_rule(): ...\n"
OPENS_DRIVER = "import ctypes\nctypes.CDLL('libcuda.so.1').cuInit\n"
without_driver = pytest.mark.skipif(environments.has_driver(), reason="needs a machine without an NVIDIA driver")


def environment(root: Path, code: str, *, installed: bool = True) -> None:
    """An FLA environment below `root` whose package runs `code` when it is imported."""
    packages = root / ".venvs" / "fla" / "lib" / "python3" / "site-packages"
    files = {"nvidia/cu13/include/cuda.h": "#define CUDA_VERSION 13000\nCUresult cuInit(unsigned int Flags);\n"}
    if installed:
        files |= {
            "fla_core-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: fla-core\nVersion: 1.0\n",
            "fla/ops/gated_delta_rule.py": code + RULES,
        }
    for name, text in files.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    python = root / ".venvs" / "fla" / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)


def test_a_whole_environment_lacks_nothing(tmp_path: Path) -> None:
    environment(tmp_path, "")
    found = check("fla", root=tmp_path)
    assert [name.partition(" ")[0] for name in found.names] == ["chunk", "recurrent"]
    assert found == Imports(names=found.names, behind_driver=(), problems={})


@without_driver
def test_what_lacks_the_drivers_library_alone_is_no_problem(tmp_path: Path) -> None:
    environment(tmp_path, OPENS_DRIVER)
    found = check("fla", root=tmp_path)
    assert found == Imports(names=found.names, behind_driver=found.names, problems={})


@without_driver
def test_a_missing_package_is_named_even_behind_the_driver(tmp_path: Path) -> None:
    environment(tmp_path, OPENS_DRIVER + "import undeclared\n")
    found = check("fla", root=tmp_path)
    assert found.behind_driver == ()
    assert list(found.problems) == list(found.names)
    assert all("No module named 'undeclared'" in problem for problem in found.problems.values())


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    environment(tmp_path, "", installed=False)
    assert check("fla", root=tmp_path).problems == {"fla-core": "is not installed"}


@pytest.mark.parametrize(("problems", "status"), [({}, 0), ({"chunk": "No module named 'undeclared'"}, 1)])
def test_the_command_fails_with_what_is_absent(
    problems: dict[str, str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = Imports(names=("chunk", "recurrent"), behind_driver=("recurrent",), problems=problems)
    told: dict[str, str | None] = {}

    def ready(*_: object, **__: object) -> None:
        told.update({name: os.environ.get(name) for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS")})

    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")  # the command's own settings end with the test
    monkeypatch.setattr(script, "ready", ready)
    monkeypatch.setattr(script, "check", lambda *_, **__: asked)
    monkeypatch.setattr(sys, "argv", ["stacks.py", "--stack", "fla", "--no-index", "--find-links", str(tmp_path)])
    assert script.main() == status
    said = capsys.readouterr().out
    assert f"fla         {2 - status} of 2 imported" in said
    assert f"library ({script.DRIVER}) alone:\n    recurrent" in said
    assert ("chunk: No module named 'undeclared'" in said) is bool(status)
    assert told == {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
