"""One worker: what it is started with, its own first steps (limits, layers), and the items that it answers."""

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Self

from traceproof.sandbox import kernel
from traceproof.sandbox.isolation import IsolationPlan, VisibleFiles, give_up, leave, new_user
from traceproof.sandbox.model import LENGTH, MIB, Limits, Status, encode, receive

Handler = Callable[[Any], Any]

TRACEBACK_FRAMES = 8  # the innermost ones; a deep recursion would print a thousand
MESSAGE_CHARACTERS = 4000
# What allocators say when they are out of host or GPU memory; PyTorch raises a plain RuntimeError on the CPU.
MEMORY_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
OPEN_FILES = 1024
# RLIMIT_NPROC counts threads too; a thread pool takes one a core, and PyTorch has several pools.
THREADS_PER_CORE = 4
THREADS_BESIDE = 256
STACK_BYTES = 8 * MIB  # of one thread, which RLIMIT_DATA counts though it is hardly touched


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A request with its surroundings."""

    limits: Limits
    plan: IsolationPlan  # the layers that this machine has
    seen: VisibleFiles  # what the worker keeps of the file system if the plan gives it a view of its own
    stage: str  # an empty folder to build that view at
    gpu: bool

    @property
    def scratch(self) -> Path:
        """The worker's own folder."""
        return Path(self.seen.scratch)

    def told(self, request: bytes) -> Self:
        """The spec of one worker, which a request's JSON tells the rest of."""
        said = json.loads(request)
        seen = VisibleFiles(self.seen.readable, said["scratch"], self.seen.devices)
        return replace(self, limits=Limits(**said["limits"]), seen=seen.concealing(said["conceal"]))


def work(spec: WorkerSpec, data: socket.socket, namespaces: Sequence[int]) -> None:
    """The worker's life, from just after its fork.

    Without descriptors of namespaces to enter, they are made here, as far as the plan has them.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the zygote took it away; its own /proc/self is its own again
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for namespace in namespaces:
        kernel.setns(namespace, 0)
    if not namespaces:
        if spec.plan.user:
            new_user()
        leave(spec.plan, spec.seen, spec.stage)
    close_all_but(0, 1, 2, data.fileno())
    os.environ["HOME"] = os.environ["TMPDIR"] = str(spec.scratch)
    tempfile.tempdir = None  # asked for anew
    os.chdir(spec.scratch)
    set_limits(spec)
    give_up(spec.plan, spec.seen, processes=spec.limits.processes != 0, gpu=spec.gpu)
    serve(data, spec)


def close_all_but(*kept: int) -> None:
    """Close every other descriptor that came with the fork."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(int(name))


def set_limits(spec: WorkerSpec) -> None:
    """The kernel's own limits, per process; the monitor's are on the sum of all."""
    limits = spec.limits
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    cores = os.cpu_count() or 1
    if spec.plan.user and linux_version() >= (5, 14):
        # Before 5.14 it counts all processes of the user, everywhere.
        lower(resource.RLIMIT_NPROC, limits.processes + THREADS_BESIDE + THREADS_PER_CORE * cores)
    if limits.memory_bytes is not None and not spec.gpu:
        # A CUDA context reserves address space by the hundred GB; without one, an allocation that can not fit
        # fails at once, with an exception instead of a kill.
        used = kernel.status_bytes(os.getpid(), b"VmData:")
        lower(resource.RLIMIT_DATA, used + limits.memory_bytes + THREADS_PER_CORE * cores * STACK_BYTES)


def linux_version() -> tuple[int, int]:
    """Major and minor version of the kernel."""
    major, minor, *_ = os.uname().release.replace("-", ".").split(".")
    return int(major), int(minor)


def lower(what: int, value: int) -> None:
    """Set a soft and hard limit, never above the present hard one."""
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value))


def run_and_exit(call: Callable[[], object]) -> NoReturn:
    """Run a forked process's whole life: no exception and no exit handler leads back into the parent's code."""
    code = 1
    try:
        call()
        code = 0
    except BaseException:  # noqa: BLE001 - the last frame of a process; what is left is to say it
        with contextlib.suppress(Exception):
            traceback.print_exc(file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def serve(channel: socket.socket, spec: WorkerSpec) -> None:
    """Set up once, then answer the supervisor until it hangs up."""
    request = receive(channel)
    if request is None:
        return
    handler, answer = _set_up(request, spec.scratch)
    _send(channel, answer | {"id": request["id"]}, spec.limits)
    while handler is not None and (request := receive(channel)) is not None:
        started = time.perf_counter()
        answer = guarded(lambda item=request["item"], run=handler: run(item))  # type: ignore[misc]
        seconds = time.perf_counter() - started
        _flush()
        _send(channel, answer | {"id": request["id"], "seconds": seconds}, spec.limits)


def _set_up(request: dict[str, Any], scratch: Path) -> tuple[Handler | None, dict[str, Any]]:
    module_name, _, function_name = request["setup"].partition(":")
    held: list[Handler] = []

    def load() -> None:
        function = getattr(importlib.import_module(module_name), function_name)
        held.append(function(request["payload"], scratch))

    answer = guarded(load)
    _flush()
    return (held[0] if held else None), answer


def guarded(call: Callable[[], Any]) -> dict[str, Any]:
    """Run the call; whatever Python raises becomes an answer, also SystemExit: here it would end the worker."""
    try:
        return {"status": Status.OK, "value": call()}
    except BaseException as error:  # noqa: BLE001 - the verdict on untrusted code is made of it
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
    except BaseException:  # noqa: BLE001 - an untrusted __str__ may raise anything
        return "(its text can not be read)"


def describe(error: BaseException) -> str:
    """The exception and where it came from, without the frames of this package's worker."""
    own = str(Path(__file__).parent)
    runner = f"{Path(own).parent}/run/runner.py"
    with contextlib.suppress(BaseException):
        kept = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(own) and frame.filename != runner
        ]
        where = "".join(traceback.format_list(kept[-TRACEBACK_FRAMES:]))
        what = "".join(traceback.format_exception_only(error)).strip()
        return f"{where}{what}"[-MESSAGE_CHARACTERS:]
    return f"{type(error).__name__}: {_text_of(error)}"[-MESSAGE_CHARACTERS:]


def _send(channel: socket.socket, answer: dict[str, Any], limits: Limits) -> None:
    try:
        data = encode(answer)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the handler's value is not JSON: {error}"
        data = encode({"id": answer["id"], "status": Status.ERROR, "message": message})
    if len(data) - LENGTH.size > limits.message_bytes:
        message = f"an answer of {len(data)} bytes; the limit is {limits.message_bytes}"
        data = encode({"id": answer["id"], "status": Status.OUTPUT, "message": message})
    channel.sendall(data)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
