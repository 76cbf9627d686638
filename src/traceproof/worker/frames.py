"""Messages between the processes: a length, then JSON. Nothing is ever unpickled."""

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")


class BrokenMessageError(Exception):
    """The other side sent something that is no message, or more than was allowed."""


class TooLargeError(BrokenMessageError):
    """The message is longer than the limit."""


def encode(message: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """The message as it goes over the wire; NaN and infinities pass, as Python's own JSON has them.

    Raises:
        TypeError, ValueError, RecursionError: the value is not JSON.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Any:  # noqa: ANN401 - any JSON value
    """The message out of its body. Raises BrokenMessageError: it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BrokenMessageError(f"not JSON: {type(error).__name__}: {error}") from error


class Reader:
    """Puts one message together out of the pieces that a stream gives."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    @property
    def empty(self) -> bool:
        """Whether no byte waits."""
        return not self._buffer

    def feed(self, data: bytes) -> None:
        """Take in what arrived. Raises TooLargeError: the message announces, or sent, more than the limit."""
        self._buffer += data
        if len(self._buffer) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer)
            if size > self._limit:
                raise TooLargeError(f"an answer of {size} bytes; the limit is {self._limit}")
            if len(self._buffer) > LENGTH.size + size:
                raise BrokenMessageError("more than one answer to one item")

    def take(self) -> bytearray | None:
        """The body of the message if it is complete, else None."""
        if len(self._buffer) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._buffer)
        if len(self._buffer) < LENGTH.size + size:
            return None
        body = self._buffer[LENGTH.size :]
        self._buffer = bytearray()
        return body


def receive(channel: socket.socket) -> Any:  # noqa: ANN401 - any JSON value
    """The next message of a blocking stream; None at its end."""
    head = _exactly(channel, LENGTH.size)
    if head is None:
        return None
    (size,) = LENGTH.unpack(head)
    body = _exactly(channel, size)
    return None if body is None else decode(body)


def _exactly(channel: socket.socket, count: int) -> bytearray | None:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = channel.recv_into(view)
        if got == 0:
            return None
        view = view[got:]
    return buffer
