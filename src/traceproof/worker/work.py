"""The worker's own first steps: limits, layers, then the items."""

import contextlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from traceproof.worker import child, kernel, process
from traceproof.worker.model import MIB, Isolation
from traceproof.worker.sandbox import NO_LAYERS, give_up, leave, new_user
from traceproof.worker.spec import WorkerSpec

OPEN_FILES = 1024
# RLIMIT_NPROC counts threads too; a thread pool takes one a core, and PyTorch has several pools.
THREADS_PER_CORE = 4
THREADS_BESIDE = 256
STACK_BYTES = 8 * MIB  # of one thread, which RLIMIT_DATA counts though it is hardly touched


def work(spec: WorkerSpec, data: socket.socket, baseline: int, namespaces: Sequence[int]) -> None:
    """The worker's life, from just after its fork, which had `baseline` bytes.

    Without descriptors of namespaces to enter, they are made here, as far as the plan has them.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the zygote took it away; its own /proc/self is its own again
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    layers = spec.layers
    for namespace in namespaces:
        kernel.setns(namespace, 0)
    if not namespaces and layers != NO_LAYERS:
        if layers.user:
            new_user()
        leave(layers, spec.seen, spec.stage)
    close_all_but(0, 1, 2, data.fileno())
    if spec.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.visible  # CUDA has not started: the zygote never touches it
    if spec.isolation is Isolation.UNTRUSTED:
        os.environ["HOME"] = str(spec.scratch)
    child.move_to(spec.scratch)
    meter = child.Meter(baseline)
    set_limits(spec)
    if spec.isolation is Isolation.UNTRUSTED:
        give_up(layers, spec.seen, processes=spec.limits.processes != 0, gpu=spec.gpu)
    child.serve(data, spec.scratch, spec.limits, meter)


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
    if spec.isolation is Isolation.TRUSTED:
        return
    lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    cores = os.cpu_count() or 1
    if spec.layers.user and limits.processes is not None and linux_version() >= (5, 14):
        # Before 5.14 it counts all processes of the user, everywhere.
        lower(resource.RLIMIT_NPROC, limits.processes + THREADS_BESIDE + THREADS_PER_CORE * cores)
    if limits.memory_bytes is not None and not spec.gpu:
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
