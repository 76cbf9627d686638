"""The process that runs the items: sets up once, then answers one item after the other."""

import contextlib
import importlib
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceproof.worker import frames, process
from traceproof.worker.model import Limits, Refused, Status

Handler = Callable[[Any], Any]

TRACEBACK_FRAMES = 8  # the innermost ones; a deep recursion would print a thousand
MESSAGE_CHARACTERS = 4000
# What allocators say when they are out of host or GPU memory; PyTorch raises a plain RuntimeError on the CPU.
MEMORY_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")


def serve(channel: socket.socket, scratch: Path, limits: Limits, meter: "Meter") -> None:
    """Answer the supervisor until it hangs up. A worker may be set up again, for another job."""
    handler: Handler | None = None
    while (request := frames.receive(channel)) is not None:
        if "setup" in request:
            handler = None  # what the last job held is let go before the next one loads
            if "scratch" in request:
                scratch = Path(request["scratch"])
                move_to(scratch)
            handler, answer = _set_up(request, scratch)
            _send(channel, answer | {"id": request["id"]}, limits)
            continue
        if handler is None:
            return
        meter.reset()
        started = time.perf_counter()
        answer = _guarded(lambda item=request["item"], run=handler: run(item))  # type: ignore[misc]
        seconds = time.perf_counter() - started
        _flush()
        _send(channel, answer | {"id": request["id"], "seconds": seconds, "peak": meter.peak()}, limits)


def move_to(scratch: Path) -> None:
    """Make a folder the working and the temporary one."""
    os.environ["TMPDIR"] = str(scratch)
    tempfile.tempdir = None  # asked for anew
    os.chdir(scratch)


def _set_up(request: dict[str, Any], scratch: Path) -> tuple[Handler | None, dict[str, Any]]:
    module_name, _, function_name = request["setup"].partition(":")
    held: list[Handler] = []

    def load() -> None:
        function = getattr(importlib.import_module(module_name), function_name)
        held.append(function(request["payload"], scratch))

    answer = _guarded(load)
    _flush()
    return (held[0] if held else None), answer


def _guarded(call: Callable[[], Any]) -> dict[str, Any]:
    """Run the call; whatever Python raises becomes an answer, also SystemExit: here it would end the worker."""
    try:
        return {"status": Status.OK, "value": call()}
    except Refused as refusal:
        return {"status": Status.REFUSED, "message": str(refusal)[:MESSAGE_CHARACTERS]}
    except BaseException as error:  # noqa: BLE001 - the verdict on strangers' code is made of it
        return {"status": _status_of(error), "message": describe(error)}


def _status_of(error: BaseException) -> Status:
    if isinstance(error, MemoryError):
        return Status.MEMORY
    if isinstance(error, RuntimeError):
        text = _text_of(error).lower()
        if any(sign in text for sign in MEMORY_SIGNS):
            return Status.MEMORY
    return Status.ERROR


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a stranger's __str__ may raise anything
        return "(its text can not be read)"


def describe(error: BaseException) -> str:
    """The exception and where it came from, without the frames of this package's worker."""
    own = str(Path(__file__).parent)
    runner = f"{Path(own).parent}/execution/runner.py"
    with contextlib.suppress(BaseException):
        frames_of = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(own) and frame.filename != runner
        ]
        where = "".join(traceback.format_list(frames_of[-TRACEBACK_FRAMES:]))
        what = "".join(traceback.format_exception_only(error)).strip()
        return f"{where}{what}"[-MESSAGE_CHARACTERS:]
    return f"{type(error).__name__}: {_text_of(error)}"[-MESSAGE_CHARACTERS:]


def _send(channel: socket.socket, answer: dict[str, Any], limits: Limits) -> None:
    try:
        data = frames.encode(answer)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the handler's value is not JSON: {error}"
        data = frames.encode({"id": answer["id"], "status": Status.ERROR, "message": message})
    if len(data) - frames.LENGTH.size > limits.message_bytes:
        message = f"an answer of {len(data)} bytes; the limit is {limits.message_bytes}"
        data = frames.encode({"id": answer["id"], "status": Status.OUTPUT, "message": message})
    channel.sendall(data)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class Meter:
    """Highest memory of this process since `reset`, beyond a baseline; 0 where /proc does not tell.

    Made before /proc becomes read-only. The monitor's samples miss short peaks; the kernel's own mark does not.
    """

    def __init__(self, baseline: int) -> None:
        self._baseline = baseline
        try:
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self._clear = -1

    def reset(self) -> None:
        """Forget the highest so far: writing 5 resets VmHWM (Linux 4.0, proc(5))."""
        if self._clear >= 0:
            with contextlib.suppress(OSError):
                os.write(self._clear, b"5")

    def peak(self) -> int:
        """Bytes; pages of mapped files, which are mostly libraries, left out."""
        highest, files = (process.status_bytes(os.getpid(), name) for name in (b"VmHWM:", b"RssFile:"))
        return max(0, highest - files - self._baseline)
