"""Packages that stand in for an environment's own: how they are found, imported, recorded and pinned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from traceproof.checkouts.pins import Pin, write_lock
from traceproof.checkouts.tree import FolderTree
from traceproof.environments.building import Installation, importable, record_stack, stack_of
from traceproof.errors import TraceproofError
from traceproof.run.flow import LOCKED, pins_of, scan, source_state

ROOT = Path(__file__).resolve().parents[1]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_a_stack_is_known_by_its_package(tmp_path: Path) -> None:
    assert stack_of(FolderTree(write(tmp_path / "a", {"python/sglang/__init__.py": ""}))) == "sglang"
    assert stack_of(FolderTree(write(tmp_path / "b", {"numpy/__init__.py": ""}))) is None


def test_a_checkout_is_imported_with_its_kernels(tmp_path: Path) -> None:
    checkout = write(
        tmp_path / "checkout", {"flashinfer/__init__.py": "x = 1\n", "csrc/norm.cu": "//\n", "include/a.h": "//\n"}
    )
    linked = importable(checkout, "flashinfer", tmp_path / "linked")
    assert (linked / "flashinfer" / "__init__.py").read_text() == "x = 1\n"
    assert (linked / "flashinfer" / "data" / "csrc" / "norm.cu").is_file()
    assert (linked / "traceproof" / "errors.py").is_file()
    assert "Version: 0+edited" in (linked / "flashinfer_python-0+edited.dist-info" / "METADATA").read_text()
    with pytest.raises(TraceproofError, match="holds no package fla"):
        importable(checkout, "fla", tmp_path / "other")


def test_a_locked_source_needs_a_pin(tmp_path: Path) -> None:
    taken = {"fla": LOCKED, "sglang": None}
    with pytest.raises(TraceproofError, match="no pin of fla"):
        pins_of(taken, root=tmp_path)
    write_lock(tmp_path / "sources.lock", {"fla": Pin(url="x", commit="1" * 40, ref="refs/heads/main")})
    assert pins_of(taken, root=tmp_path) == {"fla": {"url": "x", "commit": "1" * 40}}


def test_an_edit_of_what_was_cloned_is_seen(tmp_path: Path) -> None:
    folder = write(tmp_path / "sources" / "fla", {"fla/__init__.py": "1"})
    cloned = tmp_path / "sources.json"
    cloned.write_text(json.dumps({"scans": {"fla": scan(folder)}}))
    assert source_state("fla", LOCKED, root=tmp_path, cloned=cloned) == "as cloned"
    write(folder, {"fla/__init__.py": "12"})
    assert source_state("fla", LOCKED, root=tmp_path, cloned=cloned) == scan(folder) != "as cloned"


def test_the_record_goes_by_what_the_package_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = write(
        tmp_path / "checkout", {"sglang/__init__.py": "", "sglang/srt/norm.py": "EPS = 1\n", "README.md": "a"}
    )
    stack = Installation.at("sglang", sys.executable)
    monkeypatch.chdir(ROOT)

    def digest(**files: str) -> str:
        write(checkout, files)
        record_stack(stack, checkout, linked=tmp_path / "linked", out=tmp_path / "sglang.json")
        record = json.loads((tmp_path / "sglang.json").read_text())
        assert record["versions"]["sglang"] == "0+edited"
        return str(record["digest"])

    first = digest()
    assert digest(**{"README.md": "b"}) == first
    assert digest(**{"sglang/srt/norm.py": "EPS = 2\n"}) != first
