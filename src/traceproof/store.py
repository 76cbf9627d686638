"""The content-addressed store: finished work, keyed by all that it depends on, never written twice.

An object is a JSON record, beside it a safetensors file where it holds tensors. The record is written last and in
one rename, so an object with a record is whole, whatever was killed and when.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.errors import TraceproofError

if TYPE_CHECKING:
    import torch

OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk below `path` into an error that says so.

    Raises:
        TraceproofError: no space is left; what was finished before stays.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        free = shutil.disk_usage(path.parent).free
        raise TraceproofError(
            f"no space left while writing {path} ({free / 2**20:.0f} MiB free)",
            todo="Free some space and run the same command again: finished work is kept and not repeated.",
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file in one rename: readers see the old content or the new one, never a part.

    Raises:
        TraceproofError: the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """`write_text` of a JSON value, one line a top-level entry being left to the reader's tools."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_if_changed(path: Path, text: str) -> bool:
    """Write only when the content differs, so that an unchanged file keeps its time. True: written."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    write_text(path, text)
    return True


class Store:
    """Objects of one kind (`outputs`, `judged`) below `root/kind/<first two digits>/<digest>`."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root = root / kind

    def record_path(self, digest: str) -> Path:
        """Where an object's record lies."""
        return self.root / digest[:2] / f"{digest}.json"

    def tensors_path(self, digest: str) -> Path:
        """Where an object's tensors lie."""
        return self.root / digest[:2] / f"{digest}.safetensors"

    def record(self, digest: str) -> dict[str, Any] | None:
        """The record of a finished object, or None. A record cut short by a power failure counts as none."""
        try:
            value: dict[str, Any] = json.loads(self.record_path(digest).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return value

    def finish(self, digest: str, record: Mapping[str, Any], tensors: Path | None = None) -> None:
        """Take over a file of tensors (moved), then write the record.

        Raises:
            TraceproofError: the disk is full.
        """
        if tensors is not None:
            target = self.tensors_path(digest)
            with disk_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.{os.getpid()}")
                try:
                    shutil.move(tensors, partial)
                    partial.replace(target)
                finally:
                    partial.unlink(missing_ok=True)
        write_json(self.record_path(digest), record)

    def tensors(self, digest: str) -> dict[str, torch.Tensor]:
        """The tensors of an object, on the CPU.

        Raises:
            FileNotFoundError: it has none.
        """
        from safetensors.torch import load_file

        return load_file(self.tensors_path(digest))
