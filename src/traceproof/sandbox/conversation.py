"""The supervisor's side of one worker: asks, waits under a deadline, drains what is printed, ends it."""

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.sandbox.model import (
    MIB,
    BrokenMessageError,
    ItemOutcome,
    Limits,
    Reader,
    Status,
    TooLargeError,
    decode,
    encode,
)
from traceproof.sandbox.monitor import GIVEN_WORD, IDLE_WORD, ITEM_WORD
from traceproof.text import plain_text

ANSWER_SPACE = 4096  # beside the value: status, a message, the time
MOST_SECONDS = 1e9  # that an answer may speak of
REPORT_BYTES = 4096
# Killing takes milliseconds; a process that hangs in a driver takes until the driver lets go.
KILL_SECONDS = 10.0


class Conversation:
    """One worker process, from its start to its end. `over` says that it takes no more messages."""

    layers: Mapping[str, str] = MappingProxyType({})  # the layers around it, as its interpreter found them

    def __init__(self, data: socket.socket, output: int, life: socket.socket, limits: Limits) -> None:
        self._data, self._output, self._life = data, output, life
        self._limits = limits
        self._count = 0
        self.ended = False
        data.setblocking(False)  # noqa: FBT003 - positional in the standard library
        os.set_blocking(output, False)

    def ask(self, message: dict[str, Any], seconds: float) -> ItemOutcome:
        """Send a message and wait for its answer; whatever goes wrong is in the answer's status.

        Raises:
            TypeError, ValueError: the message is not JSON.
        TraceproofError: no worker could be started.
        """
        identity = secrets.token_hex(8)
        pending = memoryview(encode(message | {"id": identity}))
        reader = Reader(self._limits.message_bytes + ANSWER_SPACE)
        self._count = 0
        started = time.monotonic()
        self._tell(ITEM_WORD)
        try:
            answer = self._wait(pending, reader, started + seconds)
        except TimeoutError:
            return self._end(Status.TIMEOUT, f"not done after {seconds:g} s", started)
        except TooLargeError as error:
            return self._end(Status.OUTPUT, str(error), started)
        except BrokenMessageError as error:
            return self._end(Status.CRASH, f"the worker's answer can not be read: {error}", started)
        if answer is None:
            if self._count > self._limits.output_bytes:
                return self._end(Status.OUTPUT, f"printed more than {self._limits.output_bytes} bytes", started)
            return self._end(None, "", started)
        return self._checked(answer, identity, started)

    def give(self, count: int) -> None:
        """Tell how many bytes the supervisor puts into its folder, which do not count against its limit."""
        self._tell(GIVEN_WORD + str(count).encode())

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # a monitor that is gone has left a report
            self._life.send(word)

    def _wait(self, pending: memoryview, reader: Reader, deadline: float) -> Any:  # noqa: ANN401 - JSON
        """The answer, or None if the worker ended or printed too much."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._data, selectors.EVENT_READ | selectors.EVENT_WRITE)
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._life, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, events in selector.select(left):
                    if key.fileobj is self._data:
                        if events & selectors.EVENT_WRITE:
                            pending = self._push(pending)
                            if not pending:
                                selector.modify(self._data, selectors.EVENT_READ)
                        if events & selectors.EVENT_READ and not self._pull(reader):
                            selector.unregister(self._data)
                body = reader.take()
                self._drain()
                if body is not None:
                    return decode(body)
                if self._count > self._limits.output_bytes or self.over():
                    return self._last_words(reader)

    def _push(self, pending: memoryview) -> memoryview:
        try:
            return pending[self._data.send(pending) :]
        except BlockingIOError:
            return pending
        except OSError:  # the worker closed its end: its monitor tells why
            return pending[:0]

    def _pull(self, reader: Reader) -> bool:
        """Read what there is; False at the end of the stream."""
        try:
            data = self._data.recv(MIB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        reader.feed(data)
        return bool(data)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, MIB):
                self._count += len(data)
                if self._count > self._limits.output_bytes:
                    return

    def over(self) -> bool:
        """Whether the worker is gone: ended here, or its monitor has something to say."""
        if self.ended:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self._life, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _last_words(self, reader: Reader) -> Any:  # noqa: ANN401 - any JSON value
        """An answer that was complete before the worker ended is still an answer."""
        while self._count <= self._limits.output_bytes and self._pull(reader):
            body = reader.take()
            if body is not None:
                return decode(body)
            with selectors.DefaultSelector() as selector:
                selector.register(self._data, selectors.EVENT_READ)
                if not selector.select(0):
                    break
        return None

    def _checked(self, answer: Any, identity: str, started: float) -> ItemOutcome:  # noqa: ANN401 - any JSON value
        """The answer as this package's child gives it; anything else did not come from there."""
        try:
            in_turn = answer["id"] == identity
            status = Status(answer["status"])
            message = plain_text(str(answer.get("message", "")))
            seconds = min(max(float(answer.get("seconds", time.monotonic() - started)), 0.0), MOST_SECONDS)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return self._end(Status.CRASH, f"the worker's answer can not be read: {error}", started)
        if not in_turn:
            return self._end(Status.CRASH, "the worker answered another question", started)
        self._tell(IDLE_WORD)
        value = answer.get("value") if status is Status.OK else None
        return ItemOutcome(status=status, value=value, message=message, seconds=seconds)

    def _end(self, status: Status | None, message: str, started: float) -> ItemOutcome:
        """End the worker. With no status given, the monitor's report decides."""
        seconds = time.monotonic() - started
        report = self.close()
        if status is None:
            status, message = explain(report, self._limits)
        if "reason" not in report:
            message += f"; its end was not confirmed within {KILL_SECONDS:g} s"
        return ItemOutcome(status=status, message=message.lstrip("; "), seconds=seconds)

    def close(self) -> dict[str, Any]:
        """End the worker if it lives, and return the monitor's report, empty if there is none."""
        if self.ended:
            return {}
        self.ended = True
        report: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)
        self._life.settimeout(KILL_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            report = json.loads(self._last_word() or b"{}")
            self._drain()
        self.abandon()
        return report

    def abandon(self) -> None:
        """Hang up without a word."""
        self.ended = True
        self._life.close()
        self._data.close()
        os.close(self._output)

    def _last_word(self) -> bytes:
        try:
            return self._life.recv(REPORT_BYTES)
        except ConnectionResetError:  # the monitor left our last word unread; what it said is still there
            return self._life.recv(REPORT_BYTES)


def explain(report: dict[str, Any], limits: Limits) -> tuple[Status, str]:
    """Status and words for the end that a monitor reports. Raises TraceproofError: there was no worker at all."""
    match report.get("reason"):
        case "failed":
            raise TraceproofError(f"no worker can be started here: {report['message']}")
        case "memory":
            return Status.MEMORY, f"took more than {limits.memory_bytes} bytes of memory"
        case "processes":
            return Status.PROCESSES, f"started more than {limits.processes} processes"
        case "scratch":
            return Status.OUTPUT, f"wrote more than {limits.file_bytes} bytes into its scratch folder"
        case "ended":
            return Status.CRASH, how_it_ended(int(report["wait_status"]))
        case _:
            return Status.CRASH, "the worker and its monitor exited without reporting a status"


def how_it_ended(wait_status: int) -> str:
    """A wait status in words."""
    if wait_status == -1:
        return "the worker ended, and nobody saw how"
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f"the worker exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"the worker was killed by signal {-code} ({name})"
