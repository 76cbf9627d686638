"""Files: written in one rename, sealed, in folders that live as long as their process, and left by others.

What others left, untrusted code among them, is opened here alone. Whoever wrote it may have put anything in its
place: a folder, a link, a FIFO, a file that grows as it is read. So only regular files are read, none is waited
for, every size has a bound. What a dataset holds may be a link, and what does not fit is a `NotPlainError`; what a
worker left may not, and it is a `BorderError`, which belongs to the case that it was left by.
"""

import ast
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from traceproof.digests import digest_bytes
from traceproof.errors import TraceproofError

SEAL = '{"seal": "'  # what a sealed file begins with
OWNED = re.compile(r"(?:traceproof|scratch)-[0-9]+-\w+", re.ASCII)  # names of processes' own folders
OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MIB = 1 << 20
# CPython 3.11 counts the depth of all syntax trees that are being made in one place: where a thread takes over
# while another's is half made, either ends in "SystemError: AST constructor recursion depth mismatch".
_PARSING = threading.RLock()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk below `path` into an error that says so. Raises TraceproofError: it is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        free = shutil.disk_usage(path.parent).free
        what = f"no space left while writing {path} ({free / 2**20:.0f} MiB free)"
        todo = "Free some space and run the same command again: finished work is kept and not repeated."
        raise TraceproofError(what, todo=todo) from error


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


def write_if_changed(path: Path, text: str) -> bool:
    """Write only when the content differs, so that an unchanged file keeps its time. True: written."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    write_text(path, text)
    return True


def sealed(body: str) -> str:
    """A JSON object's text with its digest as a first entry, by which `unsealed` finds it unchanged."""
    return f'{SEAL}{digest_bytes(body.encode())}",{body[1:]}\n'


def read_sealed(path: Path) -> dict[str, Any]:
    """The object in a sealed file. Raises TraceproofError: it is damaged; it is removed, to be made again."""
    try:
        found: dict[str, Any] = json.loads(unsealed(path.read_bytes()))
    except (OSError, ValueError) as error:
        path.unlink(missing_ok=True)
        todo = "Run the same command again: what is finished is kept."
        raise TraceproofError(f"{path} can not be read", problems=[str(error)], todo=todo) from error
    return found


def unsealed(data: bytes) -> bytes:
    """What `sealed` got. Raises ValueError: it was changed after it was written."""
    start, _, rest = data.partition(b",")
    body = b"{" + rest.removesuffix(b"\n")
    if start != f'{SEAL}{digest_bytes(body)}"'.encode():
        raise ValueError("it was changed after it was written")
    return body


@contextmanager
def own_folder(kind: str = "traceproof", root: Path | None = None) -> Iterator[Path]:
    """A new folder of this process's alone (`kind`: `scratch` or `traceproof`), removed whatever is in it.

    It is locked as long as the process lives, so that `sweep` tells those of killed ones.
    """
    folder, lock = _locked(kind, root)
    try:
        yield folder
    finally:
        remove_tree(folder)
        os.close(lock)


def _locked(kind: str, root: Path | None) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-", dir=root)).resolve()
        with suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # a file system that locks no folders: nobody sweeps it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def sweep(root: Path) -> None:
    """Remove folders whose process has ended."""
    for path in root.glob("*-*"):
        with suppress(OSError):  # its process lives, or another run removes it, too
            own = OWNED.fullmatch(path.name) is not None and path.lstat().st_uid == os.getuid()
            if not own or path.is_symlink():
                continue
            path.chmod(0o700)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(path)
            finally:
                os.close(lock)


# What others left.


class BorderError(Exception):
    """What was left can not be taken; the text says why."""


class NotPlainError(ValueError):
    """What is there is no file to read: a folder, a pipe, a device, too large, or it lies elsewhere."""


def read_bytes(path: Path, *, most: int) -> bytes:
    """The content of a regular file; a symbolic link is followed.

    Raises OSError: it can not be read; a link that leads in a circle, for one. NotPlainError: it is no regular
    file, or larger than `most` bytes, and then not read.
    """
    return read_resolved(path.resolve(), most=most)


def read_resolved(target: Path, *, most: int) -> bytes:
    """The content of a regular file at a resolved path; raises as `read_bytes` does."""
    # Looked at before it is opened, since opening a device may do something, and after, since it may be another.
    _expect_plain(target.stat(), most)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
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
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device"}
        kind = kinds.get(stat.S_IFMT(found.st_mode))
        raise NotPlainError(f"is {f'a {kind}' if kind else 'something'}, not a file")
    if found.st_size > most:
        raise NotPlainError(f"is larger than {most // MIB} MiB")


def read_regular(path: Path, *, most: int) -> bytes:
    """The content of a regular file of at most so many bytes; never waits, nor follows a link at its end.

    Raises BorderError: it is absent, something else, larger, or can not be read.
    """
    try:
        return read_resolved(path, most=most)
    except NotPlainError as error:
        raise BorderError(f"{path.name} {error}") from error
    except (OSError, ValueError) as error:
        raise BorderError(f"{path.name} can not be read: {error}") from error


def remove_tree(folder: Path) -> None:
    """Remove a folder in which untrusted code wrote, however deep and whatever its modes; follows no link."""
    if folder.is_symlink():
        folder.unlink()
        return
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
        return
    for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--"]):  # they walk any depth, by descriptors
        subprocess.run([*command, str(folder)], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
