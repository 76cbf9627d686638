"""Digests: what an output, a verdict or a job depends on, as a short hexadecimal string."""

import hashlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

DIGEST_BYTES = 16


def digest_bytes(data: bytes) -> str:
    """128-bit BLAKE2b of `data`, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def digest_file(path: Path) -> str:
    """`digest_bytes` of a file, which is never whole in memory. Raises OSError: it can not be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=DIGEST_BYTES)).hexdigest()


def digest_json(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Digest of a JSON value: independent of key order and white space, not of list order.

    Raises:
        ValueError: the value holds a NaN or an infinity, which JSON can not say.
        TypeError: the value is not JSON.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return digest_bytes(text.encode())


def digest_files(files: Iterable[Path], *, root: Path) -> str:
    """Digest of the files' paths below `root` and their contents, independent of the order given."""
    entries = sorted((path.relative_to(root).as_posix(), digest_bytes(path.read_bytes())) for path in files)
    return digest_json(entries)
