"""What an environment is installed from travels as files, each of them pinned by its digest."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from bundle import PinnedPackage, bundle, pins

from traceproof.environments import building as environments
from traceproof.environments.building import build
from traceproof.errors import TraceproofError

pytestmark = pytest.mark.slow
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def wheel(folder: Path, name: str, version: str = "1.0") -> str:
    """Write a wheel that holds one empty module; its sha256."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": "",
        f"{info}/METADATA": METADATA.format(name=name, version=version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{entry},,\n" for entry in [*texts, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as file:
        for entry, text in {**texts, f"{info}/RECORD": record}.items():
            file.writestr(entry, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source(folder: Path, name: str) -> str:
    """Write a source package whose setup.py must not be run; its sha256."""
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        for entry, text in {"PKG-INFO": METADATA.format(name=name, version="1.0"), "setup.py": "1 / 0\n"}.items():
            content = text.encode()
            info = tarfile.TarInfo(f"{name}-1.0/{entry}")
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip and uv look for packages; there is no index that answers."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def write_pins(root: Path, name: str, text: str) -> None:
    (root / "envs").mkdir(exist_ok=True)
    (root / "envs" / f"{name}.txt").write_text(f"# Written by a test.\n{text}")


def test_conditions_are_judged_by_the_python_that_is_asked_for(tmp_path: Path) -> None:
    old, new = (
        "one==1 ; python_full_version < '3.12' \\\n    --hash=sha256:aa",
        "one==2 ; python_full_version >= '3.12'",
    )
    elsewhere = "two==1 ; sys_platform == 'win32'"
    write_pins(
        tmp_path, "fla", f"{old}\n{new}\nthree==1 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n{elsewhere}\n"
    )
    three = PinnedPackage("three==1", ("bb", "cc"))
    path = tmp_path / "envs" / "fla.txt"
    assert list(pins(path, python="3.11")) == [PinnedPackage("one==1", ("aa",)), three]
    assert list(pins(path, python="3.13")) == [PinnedPackage("one==2", ()), three]


def test_an_environment_comes_from_a_bundle(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pins(tmp_path, "fla", f"tiny==1.0 \\\n    --hash=sha256:{wheel(index, 'tiny')}\n")
    folder = tmp_path / "bundle"
    assert bundle("fla", folder, root=tmp_path, python=HERE) == []
    assert [path.name for path in folder.iterdir()] == ["tiny-1.0-py3-none-any.whl"]
    (index / "tiny-1.0-py3-none-any.whl").unlink()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    build("fla", tmp_path / ".venvs" / "fla" / "installed.json", root=tmp_path)
    python = tmp_path / ".venvs" / "fla" / "bin" / "python"
    subprocess.run([python, "-c", "import tiny"], check=True)
    assert environments.built("fla", root=tmp_path)


def test_what_has_no_wheel_travels_as_source_with_its_builder(tmp_path: Path, index: Path) -> None:
    write_pins(tmp_path, "fla", f"bare==1.0 \\\n    --hash=sha256:{source(index, 'bare')}\n")
    tools = (f"{name}==9.0 \\\n    --hash=sha256:{wheel(index, name, '9.0')}" for name in ("setuptools", "wheel"))
    write_pins(tmp_path, "driver", "\n".join(tools) + "\n")
    folder = tmp_path / "bundle"
    assert bundle("fla", folder, root=tmp_path, python=HERE) == ["bare==1.0"]
    names = ["bare-1.0.tar.gz", "setuptools-9.0-py3-none-any.whl", "wheel-9.0-py3-none-any.whl"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path, index: Path) -> None:
    wheel(index, "tiny")
    write_pins(tmp_path, "fla", f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(TraceproofError):
        bundle("fla", tmp_path / "bundle", root=tmp_path, python=HERE)
    assert list((tmp_path / "bundle").iterdir()) == []


def test_the_cpus_torch_has_its_own_index(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert index.is_dir()
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(
            command, 1, "", "ERROR: No matching distribution found for torch==1+cpu\n"
        )

    monkeypatch.setattr(subprocess, "run", run)
    write_pins(tmp_path, "cpu", "torch==1+cpu\n")
    with pytest.raises(TraceproofError, match=r"can not be had for Python 3\.12") as caught:
        bundle("cpu", tmp_path / "bundle", root=tmp_path, python="3.12")
    assert [environments.CPU_WHEELS in command for command in asked] == [False, True]
    assert "torch==1+cpu" in str(caught.value)
