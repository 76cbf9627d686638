"""Files that others left, untrusted code among them: the one place that opens such files.

Whoever wrote them may have put anything in their place: a folder, a link, a FIFO, a file that grows as it is read.
So only regular files are read, none is waited for, every size has a bound. What a dataset holds may be a link, and
what does not fit is a `NotPlainError`; what a worker left may not, and it is a `BorderError`, which belongs to the
case that it was left by.
"""

import ast
import os
import shutil
import stat
import subprocess
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
CHUNK = 1 << 24
PIECE = 1 << 18  # bytes that are read and looked at before the next are: they stay in the cache
# CPython 3.11 counts the depth of all syntax trees that are being made in one place: where a thread takes over
# while another's is half made, either ends in "SystemError: AST constructor recursion depth mismatch".
_PARSING = threading.RLock()


class BorderError(Exception):
    """What was left can not be taken; the text says why."""


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


def parsed(source: str | bytes) -> ast.Module:
    """`ast.parse`, also for threads side by side; raises as that does."""
    with _PARSING:
        return ast.parse(source)


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


@dataclass(frozen=True, slots=True)
class RegularFile:
    """A regular file that is open, and its size in bytes when it was opened."""

    name: str
    fd: int
    size: int

    def fill(self, room: memoryview, start: int) -> None:
        """Read the bytes from `start` on into `room`. Raises BorderError: it holds fewer, or can not be read."""
        done = 0
        while done < len(room):
            try:
                got = os.preadv(self.fd, [room[done : done + CHUNK]], start + done)
            except OSError as error:
                raise BorderError(f"{self.name} can not be read: {error}") from error
            if not got:
                raise BorderError(f"{self.name} was cut short while it was read")
            done += got


@contextmanager
def regular_file(path: Path, *, most: int, exactly: int | None = None) -> Iterator[RegularFile]:
    """Open a regular file of `most` bytes, or `exactly` so many; never waits, nor follows a link at its end.

    Raises BorderError: it is absent, something else, or of another size.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise BorderError(f"{path.name} can not be read: {error}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BorderError(f"{path.name} is no regular file")
        size = found.st_size
        if size > most or (exactly is not None and size != exactly):
            wanted = f"{exactly}" if exactly is not None else f"at most {most}"
            raise BorderError(f"{path.name} holds {size} bytes, not {wanted}")
        yield RegularFile(path.name, fd, size)
    finally:
        os.close(fd)


def read_regular(path: Path, *, most: int, exactly: int | None = None) -> bytearray:
    """The content of a regular file; the arguments and what is raised are those of `regular_file`."""
    with regular_file(path, most=most, exactly=exactly) as file:
        data = bytearray(file.size)
        file.fill(memoryview(data), 0)
    return data


def new_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that must not be there yet, which nobody but this user can open.

    Raises OSError: something is there, or the disk is full.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    with os.fdopen(fd, "wb") as file:
        for part in parts:
            file.write(part)


def remove_left(path: Path) -> None:
    """Remove whatever untrusted code left at a path, if anything."""
    with suppress(FileNotFoundError):
        try:
            path.unlink()
        except OSError:
            remove_tree(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder in which strangers' code wrote, however deep and whatever its modes; follows no link."""
    if folder.is_symlink():
        folder.unlink()
        return
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
        return
    for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--"]):  # they walk any depth, by descriptors
        subprocess.run([*command, str(folder)], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
