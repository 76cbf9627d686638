r"""Starts one worker: from this very process, or, isolated, from the heavy one into namespaces made here.

    supervisor --- keeper (light) --- monitor --- first process of the namespaces (light)
                     \--- heavy zygote --- worker, placed into those namespaces

A process with PyTorch imported costs some 10 ms to fork and to end, a bare one 1 ms; so only the worker is forked
from the heavy one. Without a process namespace the monitor must be the worker's parent, and there is no keeper.
"""

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

from traceproof.worker import kernel, process
from traceproof.worker.sandbox import leave
from traceproof.worker.spec import WorkerSpec
from traceproof.worker.work import run_and_exit, work

PACKET_BYTES = 1 << 16
MOST_NAMESPACES = 4


class Direct:
    """A worker forked from here: its end is a child's end, and all it starts comes back to this subreaper."""

    def __init__(self, spec: WorkerSpec, data: socket.socket, others: list[socket.socket]) -> None:
        self.baseline = process.private_bytes(os.getpid())
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self._pid = os.fork()
        if self._pid == 0:
            for one in others:
                one.close()
            run_and_exit(lambda: work(spec, data, self.baseline, []))
        self.end_fd = -1
        with contextlib.suppress(OSError):  # kernels before 5.3: the look every few milliseconds finds the end
            self.end_fd = os.pidfd_open(self._pid)

    def wait_status(self) -> int | None:
        """Wait status if the worker has ended."""
        return process.reap().get(self._pid)

    def processes(self) -> list[int]:
        """The worker and all it started."""
        return process.descendants(os.getpid())

    def kill(self) -> None:
        """Leave nothing."""
        process.kill_all(os.getpid())


class Walled:
    """A worker forked by the heavy zygote into namespaces whose first process is a child of this one."""

    def __init__(self, spec: WorkerSpec, request: bytes, data: socket.socket, heavy: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        kernel.unshare(kernel.CLONE_NEWPID)
        self._first = os.fork()
        if self._first == 0:
            ours.close()
            run_and_exit(lambda: _first_process(spec, theirs, [data, heavy]))
        theirs.close()
        said, namespaces, _, _ = socket.recv_fds(ours, PACKET_BYTES, MOST_NAMESPACES)
        if not namespaces:
            raise OSError(said.decode(errors="replace") or "the namespace's first process ended")
        self._reply, their_reply = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(heavy, [request], [data.fileno(), 1, their_reply.fileno(), *namespaces])
        for one in (ours, their_reply):
            one.close()
        for fd in namespaces:
            os.close(fd)
        reply = self._hear()
        if reply is None:
            raise OSError("the heavy zygote is gone")
        self._pid: int = reply["pid"]
        self.baseline: int = reply["baseline"]
        self.end_fd = self._reply.fileno()

    def _hear(self) -> dict[str, Any] | None:
        said = self._reply.recv(PACKET_BYTES)
        reply: dict[str, Any] | None = json.loads(said) if said else None
        return reply

    def wait_status(self) -> int | None:
        """Wait status if the worker has ended; -1 if nobody knows it."""
        if not select.select([self._reply], [], [], 0)[0]:
            return None
        reply = self._hear()
        return -1 if reply is None else int(reply["wait_status"])

    def processes(self) -> list[int]:
        """The worker and all it started."""
        return [self._pid, *process.descendants(self._pid), *process.descendants(self._first)]

    def kill(self) -> None:
        """Kill the namespace's first process: the kernel kills all that is inside."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)
        os.waitpid(self._first, 0)  # it ends after all others inside have


Launched = Direct | Walled


def _first_process(spec: WorkerSpec, monitor: socket.socket, others: list[socket.socket]) -> None:
    """Process 1 of the namespaces: builds the view, hands the namespaces over, then reaps until it is killed."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([monitor], [], [], 0)[0]:  # the monitor ended before the line above
        return
    for one in others:
        one.close()
    try:
        leave(spec.layers, spec.seen, spec.stage)
    except OSError as error:
        monitor.send(str(error).encode())
        return
    layers = spec.layers
    made = {"mnt": layers.files, "net": layers.network, "ipc": layers.ipc}
    names = ["pid", *(name for name, own in made.items() if own)]
    fds = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]
    socket.send_fds(monitor, [b"+"], fds)
    monitor.close()
    for fd in fds:
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the worker are reaped by the kernel
    while True:
        signal.pause()


class Heavy:
    """The zygote behind the isolation layers: forks workers for monitors that are not its children."""

    def __init__(self, requests: socket.socket, spec_of: Callable[[bytes], WorkerSpec]) -> None:
        self._requests = requests
        self._order_of = spec_of
        self._baseline = process.private_bytes(os.getpid())
        self._monitors: dict[int, socket.socket] = {}
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)  # noqa: FBT003 - positional in the standard library
        self._wake_write = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork on request until no one is left who could ask."""
        while True:
            ready, _, _ = select.select([self._requests, self._wake], [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(PACKET_BYTES)
                self._tell_ends()
            if self._requests in ready:
                request, fds, _, _ = socket.recv_fds(self._requests, PACKET_BYTES, 3 + MOST_NAMESPACES)
                if not request:
                    return
                self._fork(request, fds)

    def _tell_ends(self) -> None:
        for pid, status in process.reap().items():
            monitor = self._monitors.pop(pid, None)
            if monitor is not None:
                with contextlib.suppress(OSError):  # a killed monitor receives nothing
                    monitor.send(json.dumps({"wait_status": status}).encode())
                monitor.close()

    def _fork(self, request: bytes, fds: list[int]) -> None:
        data, output, reply = fds[:3]
        pid_namespace, *others = fds[3:]
        monitor = socket.socket(fileno=reply)
        kernel.setns(pid_namespace, kernel.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.dup2(output, 1)
            os.dup2(output, 2)
            run_and_exit(lambda: work(self._order_of(request), socket.socket(fileno=data), self._baseline, others))
        kernel.setns(self._own, kernel.CLONE_NEWPID)
        self._monitors[pid] = monitor
        with contextlib.suppress(OSError):
            monitor.send(json.dumps({"pid": pid, "baseline": self._baseline}).encode())
        for fd in (data, output, pid_namespace, *others):
            os.close(fd)
