"""Forks the worker, inside the namespaces that the plan names, and shuts it in."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from traceproof.worker import child, process
from traceproof.worker.model import Limits


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that runs. `top` is the direct child: the init of its PID namespace, or the worker itself."""

    top: int
    init: int | None = None

    def wait_status(self, status: int) -> int:
        """Wait status of the worker, given that of `top`."""
        return status

    def kill_namespace(self) -> None:
        """Kill the namespace's init, and with it all that is inside."""


def launch(channel: socket.socket, life: socket.socket, scratch: Path, limits: Limits) -> Launched:
    """Fork the worker. Returns in the caller only."""
    baseline = process.private_bytes(os.getpid())
    pid = os.fork()
    if pid == 0:
        life.close()
        run_and_exit(lambda: _work(channel, scratch, limits, baseline))
    return Launched(top=pid)


def _work(channel: socket.socket, scratch: Path, limits: Limits, baseline: int) -> None:
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.environ |= {"HOME": str(scratch), "TMPDIR": str(scratch)}
    os.chdir(scratch)
    set_limits(limits)
    child.serve(channel, scratch, limits, baseline)


def set_limits(limits: Limits) -> None:
    """Resource limits of the kernel; those on memory and processes are the warden's."""
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, limits.file_bytes)


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
