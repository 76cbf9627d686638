"""Files: written by rename, sealed, in folders that live as long as their process, or left by untrusted code.

Files that others left, also untrusted code, are only opened here. Their author may have put anything in their
place: a folder, a link, a FIFO, a file that grows while it is read. So only regular files are read, none is waited
for, and every size has a bound. Files of a dataset may be links, and what is not acceptable raises
`NotPlainError`; a worker's files may not, and raise `BorderError`, which belongs to the worker's case.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from traceproof.digests import DIGEST_BYTES, digest_bytes
from traceproof.errors import TraceproofError

SEAL = '{"seal": "'  # start of a sealed file
OWNED = re.compile(r"(?:traceproof|scratch)-[0-9]+-\w+", re.ASCII)  # names of `own_folder`
OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MIB = 1 << 20
# CPython 3.11 counts the depth of syntax trees under construction in one place for all threads: if another thread
# takes over in between, either fails with "SystemError: AST constructor recursion depth mismatch".
_PARSING = threading.RLock()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of a full disk at `path` into a TraceproofError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        there = next(parent for parent in path.absolute().parents if parent.is_dir())
        free = shutil.disk_usage(there).free
        what = f"no space left while writing {path} ({free / 2**20:.0f} MiB free)"
        todo = "Free some space and run the same command again: finished work is kept and not repeated."
        raise TraceproofError(what, todo=todo) from error


def write_text(path: Path, text: str) -> None:
    """Write a file by rename: readers see the old or the new one. Raises TraceproofError: the disk is full."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """`write_text` of a JSON value, indented by 1."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_if_changed(path: Path, text: str) -> bool:
    """Write only if the content differs, so that an unchanged file keeps its time. True: written."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    write_text(path, text)
    return True


def kept_json(path: Path) -> dict[str, Any]:
    """The object in a file that this package wrote; {}: it is absent, or damaged, which has nothing to keep."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def sealed(body: str) -> str:
    """The text of a JSON object with its digest as first entry, which `unsealed` checks."""
    return f'{SEAL}{digest_bytes(body.encode())}",{body[1:]}\n'


def read_sealed(path: Path) -> dict[str, Any]:
    """The object in a sealed file. Raises TraceproofError: it is damaged; it is then removed, to be made again."""
    try:
        value: dict[str, Any] = json.loads(unsealed(path.read_bytes()))
    except (OSError, ValueError) as error:
        path.unlink(missing_ok=True)
        todo = "Run the same command again: what is finished is kept."
        raise TraceproofError(f"{path} can not be read", problems=[str(error)], todo=todo) from error
    return value


def unsealed(data: bytes) -> bytes:
    """The text passed to `sealed`, as bytes. Raises ValueError: it was changed since."""
    start, _, rest = data.partition(b",")
    body = b"{" + rest.removesuffix(b"\n")
    if start != f'{SEAL}{digest_bytes(body)}"'.encode():
        raise ValueError("it was changed after it was written")
    return body


def seal_of(path: Path) -> str:
    """The digest with which a sealed file starts."""
    with path.open(encoding="utf-8") as file:
        return file.read(len(SEAL) + 2 * DIGEST_BYTES)[len(SEAL) :]


@contextmanager
def own_folder(kind: str = "traceproof", root: Path | None = None) -> Iterator[Path]:
    """A new folder for this process alone (`kind`: `scratch` or `traceproof`), removed at exit with all content.

    It is locked as long as the process lives, so that `sweep` recognises those of killed ones.
    """
    folder, lock = _locked(kind, root)
    try:
        yield folder
    finally:
        remove_tree(folder)
        os.close(lock)


def _locked(kind: str, root: Path | None) -> tuple[Path, int]:
    """(a new folder, descriptor that holds its lock)."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-", dir=root)).resolve()
        with suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # on a file system without locks for folders, sweep removes none either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def sweep(root: Path) -> None:
    """Remove folders in `root` whose process has ended."""
    for path in root.glob("*-*"):
        with suppress(OSError):  # its process lives, or another run removes it too
            ours = OWNED.fullmatch(path.name) is not None and path.lstat().st_uid == os.getuid()
            if not ours or path.is_symlink():
                continue
            path.chmod(0o700)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(path)
            finally:
                os.close(lock)


# Files that others left.


class BorderError(Exception):
    """A worker's file can not be accepted; the text says why."""


class NotPlainError(ValueError):
    """A path is no file to read: a folder, a pipe, a device, or too large."""


def read_bytes(path: Path, *, most: int) -> bytes:
    """The content of a regular file; symbolic links are followed.

    Raises OSError: it can not be read, as with a circle of links. NotPlainError: it is no regular file, or larger
    than `most` bytes, and then not read.
    """
    return read_resolved(path.resolve(), most=most)


def read_resolved(target: Path, *, most: int) -> bytes:
    """The content of a regular file at a resolved path; raises like `read_bytes`."""
    # Checked before opening, since opening a device may have effects, and after, since it may be another file by
    # then.
    _expect_plain(target.stat(), most)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        _expect_plain(os.fstat(file.fileno()), most)
        content = file.read(most + 1)
    if len(content) > most:
        raise NotPlainError(f"is larger than {most // MIB} MiB")
    return content


def parsed(source: str | bytes) -> ast.Module:
    """`ast.parse`, made safe for several threads; raises the same."""
    with _PARSING:
        return ast.parse(source)


def parse_quietly(source: str | bytes) -> ast.Module:
    """Parse a Python file, without warnings about invalid escapes in it.

    Raises SyntaxError, ValueError: it is not Python. RecursionError, MemoryError: it is nested too deeply.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parsed(source)


def statements(body: Iterable[ast.AST], *, inside: tuple[type[ast.AST], ...] = (ast.AST,)) -> Iterator[ast.stmt]:
    """Statements of a body, and those inside of statements of these types at any depth, outer ones first."""
    for node in body:
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, (ast.ExceptHandler, ast.match_case, *inside)):
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from statements(getattr(node, field, ()), inside=inside)


def _expect_plain(status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device"}
        kind = kinds.get(stat.S_IFMT(status.st_mode))
        raise NotPlainError(f"is {f'a {kind}' if kind else 'something'}, not a file")
    if status.st_size > most:
        raise NotPlainError(f"is larger than {most // MIB} MiB")


def read_regular(path: Path, *, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; never waits, nor follows a link at the end of `path`.

    Raises BorderError: it is absent, something else, larger, or can not be read.
    """
    try:
        return read_resolved(path, most=most)
    except NotPlainError as error:
        raise BorderError(f"{path.name} {error}") from error
    except (OSError, ValueError) as error:
        raise BorderError(f"{path.name} can not be read: {error}") from error


def remove_tree(folder: Path) -> None:
    """Remove a folder of untrusted code, of any depth and modes; follows no link. A failure is not reported."""
    if folder.is_symlink():
        folder.unlink()
        return
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
        return
    for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--"]):  # these walk any depth, by descriptors
        subprocess.run([*command, str(folder)], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
