"""The content-addressed store: finished work, keyed by all that it depends on, never written twice.

An object is a JSON record, beside it a safetensors file where it holds tensors. The record is written last and in
one rename, so an object with a record is whole, whatever was killed and when. The record states its own digest and
that of the tensors; what is not as it was written is dropped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.untrusted.border import BorderError, read_json, regular_digest, regular_file

if TYPE_CHECKING:
    import numpy as np
    import torch

OUTPUTS, JUDGED, SUMMARIES = KINDS = ("outputs", "judged", "summaries")
DIGEST = re.compile(r"[0-9a-f]{32,64}")
TENSORS = "tensors"  # key of a record: SHA-256 of the file of tensors beside it
SEAL = "seal"
# Torch's names of a safetensors file's dtypes.
DTYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "C64": "complex64",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
SEALED_BYTES = 1 << 30
LARGEST = 1 << 38  # bytes of a file of tensors
OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk below `path` into an error that says so. Raises TraceproofError: it is full."""
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
    """Write a file in one rename: readers see old or new, no part. Raises TraceproofError: the disk is full."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """`write_text` of a JSON value, one line per top-level entry being left to the reader's tools."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object with its digest, by which `read_sealed` finds it unchanged; raises as `write_text` does.

    One line per top-level entry: the encoder in C knows no further ones, and Python's own takes ten times as long.
    """
    body = {key: part for key, part in value.items() if key != SEAL}
    entries = {SEAL: digest_json(body), **body}.items()
    lines = (f"{_compact(key)}: {_compact(part)}" for key, part in entries)
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _compact(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote, without the seal. Raises BorderError: it is absent, or not what was written."""
    value = read_json(path, most=SEALED_BYTES)
    if not isinstance(value, dict) or value.pop(SEAL, None) != digest_json(value):
        raise BorderError(f"{path.name} was changed after it was written")
    return value


def write_if_changed(path: Path, text: str) -> bool:
    """Write only when the content differs, so that an unchanged file keeps its time. True: written."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    write_text(path, text)
    return True


def linked(path: Path, target: Path) -> None:
    """Give a file another name in place of whatever has it; a copy of its own where there are no links.

    Raises TraceproofError: the disk is full.
    """
    target.unlink(missing_ok=True)
    try:
        os.link(path, target)
    except OSError:  # another file system, or one without links
        with disk_errors(target):
            shutil.copy2(path, target)


def load_tensors(path: Path, digest: str | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, on the CPU. Raises BorderError: it is absent, none, or of another digest."""
    import torch

    with regular_file(path, most=LARGEST) as file:
        whole = torch.empty(file.size, dtype=torch.uint8).numpy()
        file.fill(whole.data, 0)
    if digest is not None and hashlib.sha256(whole.data).hexdigest() != digest:
        raise BorderError(f"{path.name} is not what was written: its digest is another")
    try:
        start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
        header = json.loads(whole[8:start].tobytes())
        return {name: _tensor(whole, start, spec) for name, spec in header.items() if name != "__metadata__"}
    except (AttributeError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise BorderError(f"{path.name} holds no tensors: {error}") from error


def _tensor(whole: np.ndarray, start: int, spec: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of a safetensors file, in the memory that holds the file: `safetensors` itself would copy it."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[spec["dtype"]])
    first, end = spec["data_offsets"]
    count = (end - first) // dtype.itemsize
    if not count:
        return torch.empty(0, dtype=dtype).reshape(spec["shape"])
    return torch.frombuffer(whole, dtype=dtype, count=count, offset=start + first).reshape(spec["shape"])


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DamagedError(TraceproofError):
    """A finished object is not what was written; it has been dropped."""


class Store:
    """Objects of one of the KINDS below `root/kind/<first two digits>/<digest>`.

    An object that is not what was written is dropped, which a line on stderr says.
    """

    def __init__(self, root: Path, kind: str) -> None:
        self.root = root / kind

    def record_path(self, digest: str) -> Path:
        """Where an object's record lies. Raises ValueError: that is no digest."""
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest")
        return self.root / digest[:2] / f"{digest}.json"

    def tensors_path(self, digest: str) -> Path:
        """Where an object's tensors lie; raises as `record_path` does."""
        return self.record_path(digest).with_suffix(".safetensors")

    def record(self, digest: str) -> dict[str, Any] | None:
        """The record of a finished object, or None. What was changed is dropped and counts as none."""
        path = self.record_path(digest)
        if not os.path.lexists(path):
            return None
        try:
            sealed = read_json(path)
            if isinstance(sealed, dict) and "seal" not in sealed:
                return None  # an earlier version's
            record = sealed["record"]
            whole = isinstance(record, dict) and sealed["seal"] == _seal(digest, record)
        except (BorderError, KeyError, TypeError, ValueError) as error:
            self._dropped(digest, str(error))
            return None
        if not whole:
            self._dropped(digest, "it was changed after it was written")
        return dict(record) if whole else None

    def whole(self, digest: str, record: Mapping[str, Any]) -> bool:
        """Whether an object's tensors are those that its record was written with; if not, it is dropped."""
        wanted = record.get(TENSORS)
        if wanted is None:
            return True
        path = self.tensors_path(digest)
        try:
            found = regular_digest(path, most=LARGEST)
        except BorderError as error:
            self._dropped(digest, str(error))
            return False
        if found != wanted:
            self._dropped(digest, "its tensors were changed after they were written")
        return bool(found == wanted)

    def changed(self, digest: str, *, tensors: bool) -> int | None:
        """When an object's files changed last, by their inodes, in nanoseconds; None: they are not all there."""
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest")
        stem = f"{self.root}/{digest[:2]}/{digest}"  # of paths there would be thousands
        try:
            found = [os.lstat(stem + suffix) for suffix in (".json", ".safetensors")[: 1 + tensors]]
        except OSError:
            return None
        return max(one.st_ctime_ns for one in found) if all(stat.S_ISREG(one.st_mode) for one in found) else None

    def _dropped(self, digest: str, why: str) -> None:
        """Remove an object, and say so."""
        sys.stderr.write(f"store: {self.root.name} {digest} is dropped and will be computed again: {why}\n")
        for path in (self.record_path(digest), self.tensors_path(digest)):
            with suppress(OSError):
                path.unlink()

    def finish(self, digest: str, record: Mapping[str, Any], tensors: Path | None = None) -> dict[str, Any]:
        """Take over a file of tensors (moved), then write the record; gives it, with the digest of the tensors.

        Tensors that are there already stay: `--force` writes no gigabytes to disk then. Others are removed first,
        record before tensors: ext4 writes a file out when it is renamed over another one, and the job waits for
        that. Raises TraceproofError: the disk is full.
        """
        written = dict(record)
        if tensors is not None:
            written[TENSORS] = file_digest(tensors)
        there = tensors is not None and self._holds(digest, written[TENSORS], tensors.stat().st_size)
        self.record_path(digest).unlink(missing_ok=True)
        if tensors is not None and not there:
            target = self.tensors_path(digest)
            target.unlink(missing_ok=True)
            with disk_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.{os.getpid()}")
                try:
                    tensors.chmod(0o600)
                    shutil.move(tensors, partial)
                    partial.replace(target)
                finally:
                    partial.unlink(missing_ok=True)
        elif tensors is not None:
            tensors.unlink()
        write_text(self.record_path(digest), _compact({"seal": _seal(digest, written), "record": written}) + "\n")
        return written

    def _holds(self, digest: str, tensors: str, size: int) -> bool:
        """Whether an object's tensors are of a digest, by its record and the file's size and time.

        Whoever changed the file and set its time back is found out by who reads it (`tensors`).
        """
        if (self.record(digest) or {}).get(TENSORS) != tensors:
            return False
        try:
            found, written = self.tensors_path(digest).lstat(), self.record_path(digest).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == size and found.st_mtime_ns <= written.st_mtime_ns

    def tensors(self, digest: str, record: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """An object's tensors, on the CPU. Raises DamagedError: they are not what was written; it is dropped."""
        known = record if record is not None else self.record(digest)
        try:
            return load_tensors(self.tensors_path(digest), (known or {}).get(TENSORS, "none is recorded"))
        except BorderError as error:
            self._dropped(digest, str(error))
            problems = [str(error)]
            todo = "They have been dropped. Run the same command again: they are computed anew."
            raise DamagedError(f"finished outputs are damaged: {digest}", problems=problems, todo=todo) from error


def _seal(digest: str, record: Mapping[str, Any]) -> str:
    """Digest of a record and of the key that it is kept under."""
    return digest_json([digest, record])
