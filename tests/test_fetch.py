"""A dataset is fetched from a git repository or a package, and environments are installed from a bundle."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from bundle import PinnedPackage, bundle, pins
from source_remotes import Upstream, packed

from traceproof.checkouts.packages import unpack
from traceproof.dataset.fetch import FETCHED, Dataset, fetch, scan_digest, untouched
from traceproof.environments import building as environments
from traceproof.environments.building import build
from traceproof.errors import TraceproofError

DEFINITION = json.dumps({"name": "a"})
PACKAGING = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
# The least that pip asks of a package whose metadata it wants; it needs nothing from any index.
BACKEND = """
import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder) / "tiny_bench-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-bench\\nVersion: 1.0\\n")
    return info.name
def get_requires_for_build_wheel(settings=None):
    return []
def build_wheel(folder, settings=None, metadata=None):
    raise SystemExit("not needed")
"""
TOLD = "Metadata-Version: 2.1\nName: {}\nVersion: 1.0\n"


def sdist(folder: Path, files: dict[str, str]) -> str:
    """Write tiny_bench-1.0.tar.gz; its sha256."""
    own = {"pyproject.toml": PACKAGING, "backend.py": BACKEND, "PKG-INFO": TOLD.format("tiny-bench")}
    return packed(folder, "tiny_bench", {**own, **files})


def pypi(sha256: str, **changes: str) -> Dataset:
    source = {"package": "tiny-bench", "version": "1.0", "sha256": sha256, "folder": "trace", **changes}
    return Dataset.model_validate({"pypi": source})


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


@pytest.fixture
def repository(tmp_path: Path) -> Upstream:
    """A git repository with definitions in a folder."""
    found = Upstream(tmp_path / "upstream")
    found.commit({"data/definitions/x/a.json": DEFINITION, "big.txt": "beside the dataset"})
    return found


def from_git(repository: Upstream, **changes: str) -> Dataset:
    source = {"url": repository.url, "commit": repository.git("rev-parse", "HEAD"), "folder": "data"}
    return Dataset.model_validate({"git": source | changes})


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_package_is_fetched_once_and_then_never_asked_for(index: Path, tmp_path: Path) -> None:
    dataset = pypi(sdist(index, {"trace/definitions/x/a.json": DEFINITION, "other.txt": "no"}))
    folder = fetch(dataset, root=tmp_path / "out")
    assert (folder / "definitions" / "x" / "a.json").read_text() == DEFINITION
    assert not (folder / "other.txt").exists()
    (index / "tiny_bench-1.0.tar.gz").unlink()
    assert fetch(dataset, root=tmp_path / "out") == folder
    assert left_in(tmp_path / "out") == [folder.name]


def test_a_corrupt_download_is_refused_before_anything_of_it_runs(index: Path, tmp_path: Path) -> None:
    sdist(index, {"trace/definitions/x/a.json": DEFINITION, "backend.py": "raise SystemExit('ran')\n"})
    with pytest.raises(TraceproofError, match=r"is not the file that was pinned") as caught:
        fetch(pypi("0" * 64), root=tmp_path / "out")
    assert "expected sha256 " + "0" * 64 in str(caught.value)
    assert "ran" not in str(caught.value).split()
    assert left_in(tmp_path / "out") == []


def test_an_absent_package_says_where_it_was_looked_for(index: Path, tmp_path: Path) -> None:
    assert index.is_dir()
    with pytest.raises(TraceproofError, match=r"have no source package tiny-bench==1\.0") as caught:
        fetch(pypi("0" * 64), root=tmp_path / "out")
    assert str(index) in str(caught.value)
    assert "pip config list" in caught.value.todo
    assert left_in(tmp_path / "out") == []


def test_members_that_lead_elsewhere_are_left_out_and_an_archive_cut_short_is_told(tmp_path: Path) -> None:
    sdist(tmp_path, {"trace/definitions/x/a.json": DEFINITION, "trace/../../escaped.txt": "out"})
    unpack(tmp_path / "tiny_bench-1.0.tar.gz", tmp_path / "out", folder="trace")
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["a.json"]
    assert not list(tmp_path.rglob("escaped.txt"))
    archive = tmp_path / "tiny_bench-1.0.tar.gz"
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(TraceproofError, match="can not be unpacked"):
        unpack(archive, tmp_path / "again", folder="trace")


def test_a_commit_is_fetched_without_the_rest_and_once(repository: Upstream, tmp_path: Path) -> None:
    dataset = from_git(repository)
    repository.commit({"data/definitions/x/a.json": "later"})
    folder = fetch(dataset, root=tmp_path / "out")
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [FETCHED, "a.json"]
    assert (folder / "definitions" / "x" / "a.json").read_text() == DEFINITION
    repository.folder.rename(tmp_path / "gone")
    assert fetch(dataset, root=tmp_path / "out") == folder


def test_a_whole_repository_can_be_the_dataset(repository: Upstream, tmp_path: Path) -> None:
    repository.commit({"definitions/x/a.json": DEFINITION, "data/definitions/x/a.json": None})
    folder = fetch(from_git(repository, folder="."), root=tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == [FETCHED, "big.txt", "definitions"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"commit": "0" * 40}, "could not be fetched"),
        ({"url": "file:///nowhere/at/all"}, "could not be fetched"),
        ({"folder": "elsewhere"}, "holds no definitions"),
        ({"folder": "../.."}, "outside the repository|could not be fetched"),
    ],
)
def test_what_is_not_had_leaves(repository: Upstream, tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(TraceproofError, match=said):
        fetch(from_git(repository, **changes), root=tmp_path / "out")
    assert left_in(tmp_path / "out") == []


def test_an_edit_of_what_was_fetched_is_noticed_and_a_folder_used(repository: Upstream, tmp_path: Path) -> None:
    folder = fetch(from_git(repository), root=tmp_path / "out")
    assert untouched(folder)
    (folder / "definitions" / "x" / "a.json").write_text("edited")
    assert not untouched(folder)
    assert fetch(Dataset(path=folder), root=tmp_path / "other") == folder
    assert left_in(tmp_path / "other") == []


def test_a_scan_sees_names_and_contents_that_changed(tmp_path: Path) -> None:
    file = tmp_path / "definitions" / "x" / "a.json"
    file.parent.mkdir(parents=True)
    file.write_text("one")
    before = scan_digest(tmp_path)
    assert scan_digest(tmp_path) == before
    file.write_text("three")
    edited = scan_digest(tmp_path)
    file.rename(file.with_name("b.json"))
    assert len({before, edited, scan_digest(tmp_path)}) == 3


def test_a_blob_in_a_linked_folder_counts(tmp_path: Path) -> None:
    elsewhere, dataset = tmp_path / "elsewhere", tmp_path / "dataset"
    elsewhere.mkdir()
    (dataset / "blob").mkdir(parents=True)
    (dataset / "blob" / "linked").symlink_to(elsewhere)
    before = scan_digest(dataset)
    (elsewhere / "tensor.safetensors").write_bytes(b"1")
    assert scan_digest(dataset) != before


# Whose setup.py must not be run.
UNBUILT = {"PKG-INFO": TOLD.format("bare"), "setup.py": "1 / 0\n"}
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def wheel(folder: Path, name: str, version: str = "1.0") -> str:
    """Write a wheel that holds one empty module; its sha256."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": "",
        f"{info}/METADATA": TOLD.format(name).replace("1.0", version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{entry},,\n" for entry in [*texts, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as file:
        for entry, text in {**texts, f"{info}/RECORD": record}.items():
            file.writestr(entry, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_pins(root: Path, name: str, text: str) -> None:
    (root / "envs").mkdir(exist_ok=True)
    (root / "envs" / f"{name}.txt").write_text(f"# Written by a test.\n{text}")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_has_no_wheel_travels_as_source_with_its_builder(tmp_path: Path, index: Path) -> None:
    write_pins(tmp_path, "fla", f"bare==1.0 \\\n    --hash=sha256:{packed(index, 'bare', UNBUILT)}\n")
    tools = (f"{name}==9.0 \\\n    --hash=sha256:{wheel(index, name, '9.0')}" for name in ("setuptools", "wheel"))
    write_pins(tmp_path, "driver", "\n".join(tools) + "\n")
    folder = tmp_path / "bundle"
    assert bundle("fla", folder, root=tmp_path, python=HERE) == ["bare==1.0"]
    names = ["bare-1.0.tar.gz", "setuptools-9.0-py3-none-any.whl", "wheel-9.0-py3-none-any.whl"]
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.slow
def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path, index: Path) -> None:
    wheel(index, "tiny")
    write_pins(tmp_path, "fla", f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(TraceproofError):
        bundle("fla", tmp_path / "bundle", root=tmp_path, python=HERE)
    assert list((tmp_path / "bundle").iterdir()) == []


@pytest.mark.slow
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
