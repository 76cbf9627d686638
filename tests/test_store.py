"""Finished work is whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from traceproof.errors import TraceproofError
from traceproof.execution.bits import same_bits
from traceproof.store import DamagedError, Store, load_tensors, write_if_changed, write_json
from traceproof.untrusted.border import BorderError

DIGEST = "ab" * 16


def test_an_object_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path, "outputs")
    scratch = tmp_path / "scratch.safetensors"
    save_file({"y": torch.arange(3)}, scratch)
    content = scratch.read_bytes()
    store.finish(DIGEST, {"status": "ok"}, scratch)
    assert store.record(DIGEST) == {"status": "ok", "tensors": hashlib.sha256(content).hexdigest()}
    assert store.tensors(DIGEST)["y"].tolist() == [0, 1, 2]
    assert not scratch.exists()


def finish(store: Store, folder: Path, **tensors: torch.Tensor) -> os.stat_result:
    """Finish an object, and what its file of tensors is then."""
    scratch = folder / "scratch.safetensors"
    save_file(tensors, scratch)
    store.finish(DIGEST, {"status": "ok"}, scratch)
    assert not scratch.exists()
    return store.tensors_path(DIGEST).stat()


def test_tensors_that_are_there_already_are_not_written_again(tmp_path: Path) -> None:
    store = Store(tmp_path, "outputs")
    first = finish(store, tmp_path, y=torch.arange(3))
    assert finish(store, tmp_path, y=torch.arange(3)).st_ino == first.st_ino
    other = finish(store, tmp_path, y=torch.arange(1, 4))
    assert store.tensors(DIGEST)["y"].tolist() == [1, 2, 3]
    path = store.tensors_path(DIGEST)
    path.write_bytes(path.read_bytes()[:-1] + b"!")  # of the same size, and newer than its record
    os.utime(path, ns=(other.st_atime_ns, store.record_path(DIGEST).stat().st_mtime_ns + 1))
    finish(store, tmp_path, y=torch.arange(1, 4))
    assert store.tensors(DIGEST)["y"].tolist() == [1, 2, 3]


def test_tensors_of_every_dtype_are_read_as_safetensors_wrote_them(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    bits = torch.arange(48, dtype=torch.uint8)
    integers = [torch.int8, torch.uint16, torch.int32, torch.int64]
    floats = [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ]
    written = {str(dtype): bits.clone().view(dtype) for dtype in (*integers, *floats, torch.complex64)}
    written |= {"bool": bits > 3, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 5), "wide": bits.view(6, 8)}
    save_file(written, file, metadata={"a": "b"})
    found = load_tensors(file)
    assert found.keys() == written.keys()
    assert all(same_bits(found[name], value) for name, value in written.items())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02",
        b"\xff" * 8,
        b"\x02" + bytes(7) + b"[]",
        bytes(8) + b'{"y": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}' + bytes(8),
        bytes(8) + b'{"y":{"dtype":"F32", "shape": [3], "data_offsets": [0, 0]}}',
        bytes(8) + b'{"y": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}' + bytes(8),
        bytes(8) + b'{"y": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}' + bytes(8),
    ],
    ids=["empty", "cut", "endless", "no names", "too short", "nothing", "dtype", "beyond"],
)
def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.safetensors"
    head, rest = content[:8], content[8:]
    if b"{" in rest:
        head = (rest.index(b"}}") + 2).to_bytes(8, "little")
    file.write_bytes(head + rest)
    with pytest.raises(BorderError, match="holds no tensors"):
        load_tensors(file)


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


@pytest.fixture
def finished(tmp_path: Path) -> Store:
    """A store with one object."""
    save_file({"y": torch.arange(3)}, tmp_path / "made")
    store = Store(tmp_path, "outputs")
    store.finish(DIGEST, {"status": "ok", "key": DIGEST}, tmp_path / "made")
    return store


@pytest.mark.parametrize("place", [0, 20, -1])
def test_tensors_with_a_flipped_byte_are_dropped_and_said(
    finished: Store, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = finished.tensors_path(DIGEST)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    record = finished.record(DIGEST)
    assert record is not None
    assert not finished.whole(DIGEST, record)
    assert "changed after they were written" in capsys.readouterr().err
    assert finished.record(DIGEST) is None
    with pytest.raises(DamagedError, match=DIGEST):
        finished.tensors(DIGEST, record)


@pytest.mark.parametrize("edit", ["skip", "another key", "no seal", "a list", "cut", "not text", "empty"])
def test_a_record_that_was_edited_is_not_believed(finished: Store, edit: str) -> None:
    path = finished.record_path(DIGEST)
    value = json.loads(path.read_text(encoding="utf-8"))
    texts = {
        "skip": json.dumps(value | {"record": {"status": "skip", "reason": "no_cuda", "key": DIGEST}}),
        "another key": json.dumps(value | {"record": value["record"] | {"key": "../../x"}}),
        "no seal": json.dumps(value["record"] | {"status": "skip"}),
        "a list": "[]",
        "cut": path.read_text(encoding="utf-8")[:-9],
        "not text": "\x00\x01",
        "empty": "",
    }
    path.write_text(texts[edit], encoding="utf-8")
    assert finished.record(DIGEST) is None


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "loop"])
def test_what_is_no_regular_file_counts_as_none(finished: Store, kind: str, tmp_path: Path) -> None:
    path = finished.record_path(DIGEST)
    moved = path.rename(tmp_path / "moved.json")
    make: dict[str, Callable[[], None]] = {
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(moved),
        "loop": lambda: path.symlink_to(path),
    }
    make[kind]()
    assert finished.record(DIGEST) is None


@pytest.mark.parametrize("key", ["../../x", "", "AB" * 16, "ab", "ab" * 16 + "/", "ab" * 16 + "\n"])
def test_a_key_is_a_digest_and_no_path(finished: Store, key: str) -> None:
    with pytest.raises(ValueError, match="no digest"):
        finished.record(key)
