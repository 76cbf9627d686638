"""What a caller says and gets back: limits, a reply per item; messages are a length, then JSON, never a pickle."""

import fcntl
import json
import mmap
import os
import socket
import struct
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TRITON = "TRITON_CACHE_DIR"  # Triton's environment variable: folder of its compiled kernels
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # CUDA's environment variable: channels to a GPU per process


class Status(StrEnum):
    """How one item ended."""

    OK = "ok"
    ERROR = "error"  # a Python exception
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASH = "crash"  # a signal, or an unexpected exit
    OUTPUT = "output"  # printed, wrote or answered more than the limit allows
    PROCESSES = "processes"  # started more processes than the limit
    REFUSED = "refused"  # not run: the policy refuses it
    ISOLATION = "isolation"  # not run: it can not be isolated here, and weak isolation is not allowed


SAID = frozenset({Status.OK, Status.ERROR, Status.MEMORY, Status.OUTPUT})  # what a worker may say of its item


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one item may use; all limits are per item but `setup_seconds`."""

    seconds: float = 60.0  # wall clock of one item
    setup_seconds: float = 60.0  # wall clock of the setup function, imports included
    # host memory, not a GPU's, beyond the preloaded modules', over all processes of the worker; None: unlimited
    memory_bytes: int | None = 8 * GIB
    processes: int = 32  # further ones at once, enough for a compiler driver and its passes, without threads
    output_bytes: int = MIB  # what may be printed on stdout and stderr together
    file_bytes: int = 4 * GIB  # largest single file, and the scratch folder as a whole
    message_bytes: int = 64 * MIB  # largest answer

    def __post_init__(self) -> None:
        for name, value in self.as_json().items():
            least = 0 if name == "processes" else 1e-3
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be positive")

    def as_json(self) -> dict[str, Any]:
        """The limits as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How one item ended."""

    status: Status
    value: Any = None  # what the handler returned; None unless the status is ok
    message: str = ""  # empty if ok, else the end of a traceback, the signal, or the limit
    seconds: float = 0.0  # of the call, by a clock outside of its process; 0: not measured
    isolation: str = ""  # what untrusted code could reach, if isolation was incomplete; empty: nothing


LENGTH = struct.Struct("!Q")
PACKET_BYTES = 1 << 16  # of a sequenced packet
ANSWERED = b"answered"  # sent to the guard when an item is answered
ITEM = b"item "  # sent to the guard when an item begins, with the bytes of its files, which count against no limit
FILES = "files"  # key of an item: the descriptors that were sent with it
MOST_FILES = 4


class Shared:
    """Memory that a worker maps through a file descriptor; neither side can change its size."""

    def __init__(self, size: int) -> None:
        self.size = max(1, size)  # zero bytes can not be mapped
        self.fd = os.memfd_create("shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.held = mmap.mmap(self.fd, self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free its pages, even if the worker keeps the file open, as they are counted for no process."""
        self.held.madvise(mmap.MADV_REMOVE)
        os.close(self.fd)


class BrokenMessageError(Exception):
    """The other side sent something that is no message, or exceeds the limit."""


class TooLargeError(BrokenMessageError):
    """The message is longer than the limit."""


def encode(message: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """The message as it goes over the wire, NaN too. Raises TypeError, ValueError, RecursionError: no JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Any:  # noqa: ANN401 - any JSON value
    """Parse a message's body. Raises BrokenMessageError: it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BrokenMessageError(f"not JSON: {type(error).__name__}: {error}") from error


def is_whole(arrived: bytes | bytearray, limit: int) -> bool:
    """Whether a message has arrived whole. Raises BrokenMessageError: it exceeds the limit, or more follows."""
    if len(arrived) < LENGTH.size:
        return False
    (size,) = LENGTH.unpack_from(arrived)
    if size > limit:
        raise TooLargeError(f"an answer of {size} bytes; the limit is {limit}")
    if len(arrived) > LENGTH.size + size:
        raise BrokenMessageError("more than one answer to one item")
    return len(arrived) == int(LENGTH.size + size)


def receive(channel: socket.socket) -> Any:  # noqa: ANN401 - any JSON value
    """The next message of a blocking socket, with descriptors as its item's FILES; None at the end."""
    head, files, _, _ = socket.recv_fds(channel, LENGTH.size, MOST_FILES)
    head += _exactly(channel, LENGTH.size - len(head)) if head else b""
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = _exactly(channel, size)
    if len(body) < size:
        return None
    message = decode(body)
    if files:
        message["item"][FILES] = files
    return message


def _exactly(channel: socket.socket, count: int) -> bytes:
    """Receive `count` bytes, or fewer if the stream ends before."""
    found = bytearray()
    while len(found) < count and (part := channel.recv(min(count - len(found), MIB))):
        found += part
    return bytes(found)
