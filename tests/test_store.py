"""Finished work is whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from traceproof.errors import TraceproofError
from traceproof.store import Store, write_if_changed, write_json

DIGEST = "ab" * 16


def test_an_object_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path, "outputs")
    scratch = tmp_path / "scratch.safetensors"
    save_file({"y": torch.arange(3)}, scratch)
    store.finish(DIGEST, {"status": "ok"}, scratch)
    assert store.record(DIGEST) == {"status": "ok"}
    assert store.tensors(DIGEST)["y"].tolist() == [0, 1, 2]
    assert not scratch.exists()


def test_an_object_without_a_whole_record_does_not_exist(tmp_path: Path) -> None:
    store = Store(tmp_path, "outputs")
    assert store.record(DIGEST) is None
    store.finish(DIGEST, {"status": "ok"})
    store.record_path(DIGEST).write_text('{"status": "o', encoding="utf-8")
    assert store.record(DIGEST) is None


def test_a_full_disk_says_so_and_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "summary.json"
    write_json(target, {"old": 1})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(TraceproofError, match="no space left while writing"):
        write_json(target, {"new": 1})
    assert '"old"' in target.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_another_io_error_is_not_called_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "file" / "x.json", {})


def test_an_unchanged_file_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    assert write_if_changed(path, "one")
    os.utime(path, (1, 1))
    assert not write_if_changed(path, "one")
    assert path.stat().st_mtime == 1
    assert write_if_changed(path, "two")
    assert path.stat().st_mtime != 1
