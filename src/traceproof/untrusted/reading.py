"""Files that strangers left, read with bounds: regular files only, no larger than said, never waited for."""

import ast
import os
import stat
import warnings
from pathlib import Path

from traceproof.syntax import parsed

MIB = 1 << 20


class NotPlainError(ValueError):
    """What is there is no file to read: a folder, a pipe, a device, too large, or it lies elsewhere."""


def read_bytes(path: Path, *, most: int) -> bytes:
    """The content of a regular file; a symbolic link is followed.

    Raises:
        OSError: it can not be read; a link that leads in a circle, for one.
        NotPlainError: it is no regular file, or larger than `most` bytes, and then not read.
    """
    return read_resolved(path.resolve(), most=most)


def read_resolved(target: Path, *, most: int) -> bytes:
    """The content of a regular file at a resolved path; raises as `read_bytes` does."""
    # Looked at before it is opened, since opening a device may do something, and after, since it may be another.
    _expect_plain(target.stat(), most)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        _expect_plain(os.fstat(file.fileno()), most)
        content = file.read(most + 1)
    if len(content) > most:
        raise NotPlainError(f"is larger than {most // MIB} MiB")
    return content


def parse_quietly(source: str | bytes) -> ast.Module:
    """Parse a Python file; its odd escapes are its author's business, and make no warning.

    Raises SyntaxError, ValueError: it is not Python. RecursionError, MemoryError: it is nested too deeply.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parsed(source)


def _expect_plain(found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {
            stat.S_IFDIR: "a folder",
            stat.S_IFIFO: "a pipe",
            stat.S_IFSOCK: "a socket",
            stat.S_IFCHR: "a device",
        }
        raise NotPlainError(f"is {kinds.get(stat.S_IFMT(found.st_mode), 'something')}, not a file")
    if found.st_size > most:
        raise NotPlainError(f"is larger than {most // MIB} MiB")
