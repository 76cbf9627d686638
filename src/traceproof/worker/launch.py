"""Forks the worker, inside the namespaces that the plan names, and shuts it in.

With a process namespace there is one more process between warden and worker: the namespace's first. The kernel
kills everything inside when it ends, and the worker itself can be killed by signals as usual.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from traceproof.worker import child, kernel, process
from traceproof.worker.model import MIB, Isolation, Limits
from traceproof.worker.sandbox import NO_WALLS, Plan, give_up, leave, new_user
from traceproof.worker.view import View

OPEN_FILES = 1024
# RLIMIT_NPROC counts threads too; a thread pool takes one a core, and PyTorch has several pools.
THREADS_PER_CORE = 4
THREADS_BESIDE = 256
STACK_BYTES = 8 * MIB  # of one thread, which RLIMIT_DATA counts though it is hardly touched
CACHES = ("FLASHINFER_", "TRITON_")  # folders that only trusted code may know of
STATUS_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One worker to start: what the supervisor asked for, with what the zygote knows.

    Attributes:
        plan: the walls that this machine has.
        seen: what the worker keeps of the file system if the plan gives it a view of its own.
        stage: an empty folder to build that view at.
        home: the user's home folder; trusted code gets to know it.
    """

    limits: Limits
    isolation: Isolation
    plan: Plan
    seen: View
    stage: str
    home: str
    gpu: bool

    @property
    def walls(self) -> Plan:
        """The walls to put up for this worker."""
        return NO_WALLS if self.isolation is Isolation.TRUSTED else self.plan

    @property
    def scratch(self) -> Path:
        """The worker's own folder."""
        return Path(self.seen.scratch)


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that runs. `top` is the warden's child: the first process of a namespace, or the worker itself."""

    top: int
    status_pipe: int | None = None

    @property
    def init(self) -> int | None:
        """The first process of the worker's namespace, which is none of the worker's own."""
        return None if self.status_pipe is None else self.top

    def wait_status(self, status: int) -> int:
        """Wait status of the worker, given that of `top`, which has ended."""
        if self.status_pipe is None:
            return status
        said = os.read(self.status_pipe, STATUS_BYTES)
        return int.from_bytes(said, "little") if said else status

    def kill_namespace(self) -> None:
        """Kill the first process of the namespace, and with it all that is inside."""
        if self.status_pipe is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.top, signal.SIGKILL)


def launch(order: Order, channel: socket.socket, others: list[socket.socket]) -> Launched:
    """Fork the worker; returns in the caller only. `others` are closed in it."""
    baseline = process.private_bytes(os.getpid())
    if order.walls.process:
        return _launch_namespace(order, channel, others, baseline)
    pid = os.fork()
    if pid == 0:
        run_and_exit(lambda: _work(order, channel, others, baseline, inside=False))
    return Launched(pid)


def _launch_namespace(order: Order, channel: socket.socket, others: list[socket.socket], baseline: int) -> Launched:
    if order.walls.user:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else uid_map belongs to root
        new_user()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.unshare(kernel.CLONE_NEWPID)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        run_and_exit(lambda: _first_process(order, channel, others, baseline, write))
    os.close(write)
    return Launched(pid, read)


def _first_process(
    order: Order, channel: socket.socket, others: list[socket.socket], baseline: int, status_pipe: int
) -> None:
    """Process 1 of the namespace: builds the view, forks the worker, reaps, and ends when the worker does."""
    die_with_parent(status_pipe)
    for one in others:
        one.close()
    leave(order.walls, order.seen, order.stage)
    worker = os.fork()
    if worker == 0:
        os.close(status_pipe)
        run_and_exit(lambda: _work(order, channel, [], baseline, inside=True))
    channel.close()
    while True:
        pid, status = os.wait()
        if pid == worker:
            os.write(status_pipe, status.to_bytes(STATUS_BYTES, "little"))
            return


def die_with_parent(pipe: int) -> None:
    """Be killed when the parent, which holds the pipe's other end, ends; also if it already has."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(pipe, 0)
    if poll.poll(0):  # POLLERR: nobody reads
        os._exit(1)


def _work(order: Order, channel: socket.socket, others: list[socket.socket], baseline: int, *, inside: bool) -> None:
    """The worker's life. `inside`: the namespaces are entered already."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # its own /proc/self is its own again
    for one in others:
        one.close()
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    walls = order.walls
    if not inside and walls != NO_WALLS:
        if walls.user:
            new_user()
        leave(walls, order.seen, order.stage)
    _set_environment(order)
    os.chdir(order.scratch)
    meter = child.Meter(baseline)
    set_limits(order)
    if order.isolation is Isolation.UNTRUSTED:
        give_up(walls, order.seen, processes=order.limits.processes > 0)
    child.serve(channel, order.scratch, order.limits, meter)


def _set_environment(order: Order) -> None:
    scratch = str(order.scratch)
    os.environ["TMPDIR"] = scratch
    if order.isolation is Isolation.TRUSTED:
        os.environ["HOME"] = order.home
        return
    os.environ["HOME"] = scratch
    for name in [name for name in os.environ if name.startswith(CACHES)]:
        del os.environ[name]
    if order.gpu:
        os.environ["TRITON_CACHE_DIR"] = f"{scratch}/triton"


def set_limits(order: Order) -> None:
    """The kernel's own limits, per process; the warden's are on the sum of all."""
    limits = order.limits
    lower(resource.RLIMIT_CORE, 0)
    if order.isolation is Isolation.TRUSTED:
        return
    lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    cores = os.cpu_count() or 1
    if order.walls.user and linux_version() >= (5, 14):  # before that it counts all of the user's, everywhere
        lower(resource.RLIMIT_NPROC, limits.processes + THREADS_BESIDE + THREADS_PER_CORE * cores)
    if limits.memory_bytes is not None and not order.gpu:
        # A CUDA context reserves address space by the hundred GB; without one, an allocation that can not fit
        # fails at once, with an exception instead of a kill.
        used = process.status_bytes(os.getpid(), b"VmData:")
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


def order_of(request: Mapping[str, Any], *, plan: Plan, seen: View, stage: str) -> Order:
    """The order that the supervisor's request is."""
    return Order(
        limits=Limits.of_json(request["limits"]),
        isolation=Isolation(request["isolation"]),
        plan=plan,
        seen=View(seen.readable, request["scratch"], seen.devices),
        stage=stage,
        home=request["home"],
        gpu=request["gpu"],
    )


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
