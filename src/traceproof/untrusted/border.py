"""What strangers' code and the store left, turned into typed values: the one place that opens such files.

Whoever wrote them may have put anything in their place: a folder, a link, a FIFO, a file that grows as it is read.
So only regular files are read, no link is followed, every size and count has a bound, and what does not fit is a
`BorderError`, which belongs to the case that it was left by.
"""

import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_OUTPUTS = 64
MOST_AXES = 16
MOST_REPETITIONS = 10_000
LONGEST_AXIS = 1 << 40
NAME_CHARACTERS = 64
MESSAGE_CHARACTERS = 8000
JSON_BYTES = 64 << 20  # of a record or a judged definition
CHUNK = 1 << 24
PIECE = 1 << 18  # bytes that are read and looked at before the next are: they stay in the cache


class BorderError(Exception):
    """What was left can not be taken; the text says why."""


CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True)
Nanoseconds = Annotated[int, Field(ge=0, lt=1 << 53)]
Pair = Annotated[list[Nanoseconds], Field(min_length=2, max_length=2)]
Index = Annotated[int, Field(ge=0, lt=MOST_OUTPUTS)]


class Returned(BaseModel):
    """What a worker says of one output; its bytes lie in a file."""

    model_config = CLOSED
    index: Index
    name: Annotated[str, Field(max_length=200)] | None
    dtype: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{2,20}$")]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=LONGEST_AXIS)]], Field(max_length=MOST_AXES)]


class Answer(BaseModel):
    """All that a worker which runs strangers' code may say of a call.

    `aliased`, `subclassed`, `written` (inputs that it changed on a GPU and wrote back to their file) and `late`
    (outputs that changed after the call's stream was done) can be seen in its process only: what is said there
    counts against it, and what is not said proves nothing. `times` are held against a clock of ours.
    """

    model_config = CLOSED
    outputs: Annotated[list[Returned], Field(max_length=MOST_OUTPUTS)]
    aliased: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)]
    subclassed: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)]
    written: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)] = []
    late: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)] = []
    times: Annotated[list[Pair], Field(max_length=MOST_REPETITIONS)] = []


def answer_of(value: object) -> Answer:
    """A worker's answer. Raises BorderError: it is not in the form above."""
    try:
        return Answer.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise BorderError(f"the worker's answer is not in its form: {where}: {first['msg']}") from None


def plain_text(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """Text that any file can hold: without lone surrogates, cut to a length."""
    return text[-most:].encode("utf-8", errors="backslashreplace").decode("utf-8")


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


def regular_digest(path: Path, *, most: int) -> str:
    """SHA-256 of a regular file; the arguments and what is raised are those of `regular_file`."""
    digest = hashlib.sha256()
    room = memoryview(bytearray(PIECE))
    with regular_file(path, most=most) as file:
        for start in range(0, file.size, PIECE):
            part = room[: min(PIECE, file.size - start)]
            file.fill(part, start)
            digest.update(part)
    return digest.hexdigest()


def read_json(path: Path, *, most: int = JSON_BYTES) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON value in a regular file. Raises BorderError: it is no such file, or no JSON."""
    try:
        return json.loads(bytes(read_regular(path, most=most)))
    except (ValueError, RecursionError) as error:
        raise BorderError(f"{path.name} is not JSON: {error}") from error


def new_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that must not be there yet, which nobody but this user can open.

    Raises OSError: something is there, or the disk is full.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    with os.fdopen(fd, "wb") as file:
        for part in parts:
            file.write(part)


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
