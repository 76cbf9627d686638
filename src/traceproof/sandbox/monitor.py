"""Starts one worker and watches it from outside: what it uses, when it ends; ends it; tells how it ended.

It runs no foreign code. It ends the worker when the supervisor hangs up, so a killed supervisor leaves nothing.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from traceproof.sandbox import kernel
from traceproof.sandbox.isolation import SHARED, leave
from traceproof.sandbox.worker import WorkerSpec, run_and_exit, work

# The next look comes before the worker can have passed its memory limit, were several cores to touch fresh pages,
# but not sooner than 20 ms (at 2 GB/s per thread, 40 MB of overshoot): a look costs about 0.3 ms of a core.
FRESH_BYTES_PER_SECOND = 8e9
LEAST_LOOK_SECONDS = 0.02
MOST_LOOK_SECONDS = 0.05
IDLE_LOOK_SECONDS = 0.25  # between two items, for threads that untrusted code may have left running
SCRATCH_SECONDS = 0.25  # walking the scratch folder costs more than looking at /proc
SCRATCH_ENTRIES = 100_000  # a folder of more files than this is a flood by itself
WORD_BYTES = 4096
PACKET_BYTES = 1 << 16
MOST_NAMESPACES = 4
IDLE_WORD = b"idle"  # the item was answered
ITEM_WORD = b"item"  # an item begins
GIVEN_WORD = b"given "  # and a number: how many bytes the supervisor puts into the scratch folder


class Direct:
    """A worker forked from here: its end is a child's end, and all it starts comes back to this subreaper."""

    def __init__(self, spec: WorkerSpec, data: socket.socket, others: list[socket.socket]) -> None:
        self.baseline = kernel.private_bytes(os.getpid())
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self._pid = os.fork()
        if self._pid == 0:
            for one in others:
                one.close()
            run_and_exit(lambda: work(spec, data, []))
        self.end_fd = -1
        with contextlib.suppress(OSError):  # kernels before 5.3: the look every few milliseconds finds the end
            self.end_fd = os.pidfd_open(self._pid)

    def wait_status(self) -> int | None:
        """Wait status if the worker has ended."""
        return kernel.reap().get(self._pid)

    def processes(self) -> list[int]:
        """The worker and all it started."""
        return kernel.descendants(os.getpid())

    def bytes_of(self, pid: int, field: bytes) -> int:
        """A field of the status of one of them."""
        return kernel.status_bytes(pid, field)

    def kill(self) -> None:
        """Leave nothing."""
        kernel.kill_all(os.getpid())


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
        said, fds, _, _ = socket.recv_fds(ours, PACKET_BYTES, 1 + MOST_NAMESPACES)
        if not fds:
            raise OSError(said.decode(errors="replace") or "the namespace's first process ended")
        self._proc, *namespaces = fds
        self._reply, their_reply = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(heavy, [request], [data.fileno(), 1, their_reply.fileno(), *namespaces])
        for one in (ours, their_reply):
            one.close()
        for fd in namespaces:
            os.close(fd)
        said = self._reply.recv(PACKET_BYTES)
        if not said:
            raise OSError("the heavy zygote is gone")
        self.baseline = int(said)
        self.end_fd = self._reply.fileno()

    def wait_status(self) -> int | None:
        """Wait status if the worker has ended; -1 if nobody knows it."""
        if not select.select([self._reply], [], [], 0)[0]:
            return None
        return int(self._reply.recv(PACKET_BYTES) or b"-1")

    def processes(self) -> list[int]:
        """The worker and all it started: what the namespaces' own /proc shows beside its first process."""
        return [pid for pid in kernel.numbers_in(self._proc) if pid != 1]

    def bytes_of(self, pid: int, field: bytes) -> int:
        """A field of the status of one of them."""
        return kernel.status_bytes(pid, field, proc=self._proc)

    def kill(self) -> None:
        """Kill the namespace's first process: the kernel kills all that is inside."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)
        os.waitpid(self._first, 0)  # it ends after all others inside have


def _first_process(spec: WorkerSpec, monitor: socket.socket, others: list[socket.socket]) -> None:
    """Process 1 of the namespaces: builds the view, hands the namespaces over, then reaps until it is killed."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([monitor], [], [], 0)[0]:  # the monitor ended before the line above
        return
    for one in others:
        one.close()
    try:
        leave(spec.plan, spec.seen, spec.stage)
    except OSError as error:
        monitor.send(str(error).encode())
        return
    made = {"net": spec.plan.network, "ipc": spec.plan.ipc}
    paths = ["/proc", *(f"/proc/self/ns/{name}" for name in ("pid", "mnt", *(one for one in made if made[one])))]
    fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
    socket.send_fds(monitor, [b"+"], fds)
    monitor.close()
    for fd in fds:
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the worker are reaped by the kernel
    while True:
        signal.pause()


@dataclass(slots=True)
class Monitor:
    """The watch over one worker."""

    launched: Direct | Walled
    # socket to the supervisor: a word there means that an item begins or was answered, its end means "end the
    # worker"; the report goes back over it
    life: socket.socket
    spec: WorkerSpec  # what the worker may use
    _next_scratch: float = field(default=0.0, init=False)
    _scratch_bytes: int = field(default=0, init=False)
    _given: int = field(default=0, init=False)
    _used: int = field(default=0, init=False)
    _idle: bool = field(default=False, init=False)

    def watch(self) -> None:
        """Return once the worker and everything it started are gone and the report is sent."""
        poll = select.poll()
        for fd in (self.life.fileno(), self.launched.end_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        reason = None
        while reason is None:
            ready = {fd for fd, _ in poll.poll(self._pause())}
            status = self.launched.wait_status()
            if status is not None:
                self._finish({"reason": "ended", "wait_status": status})
                return
            if self.life.fileno() in ready:
                word = self.life.recv(WORD_BYTES)
                if word == ITEM_WORD:
                    self._idle = False
                    continue  # the look when it ends, or in a moment, tells more
                if word.startswith(GIVEN_WORD):
                    self._given = int(word.removeprefix(GIVEN_WORD))
                    continue
                self._idle = True
                reason = None if word else "asked"
            reason = reason or self._excess()
        self._finish({"reason": reason})

    def _pause(self) -> float:
        """Milliseconds until the next look."""
        if self._idle:
            return IDLE_LOOK_SECONDS * 1000
        most = self.spec.limits.memory_bytes
        left = MOST_LOOK_SECONDS if most is None else (most - self._used) / FRESH_BYTES_PER_SECOND
        return max(LEAST_LOOK_SECONDS, min(MOST_LOOK_SECONDS, left)) * 1000

    def _excess(self) -> str | None:
        full = self._scratch_is_full()
        below = self.launched.processes()
        used = sum(max(0, self.launched.bytes_of(pid, b"RssAnon:") - self.launched.baseline) for pid in below)
        shared = sum(self.launched.bytes_of(pid, b"RssShmem:") for pid in below)
        if self.spec.scratch.is_relative_to(SHARED):  # its files are limited by themselves
            shared = max(0, shared - max(self._scratch_bytes, self._given))
        self._used = used + shared
        most = self.spec.limits.memory_bytes
        if most is not None and self._used > most:
            return "memory"
        if len(below) - 1 > self.spec.limits.processes:
            return "processes"
        return "scratch" if full else None

    def _scratch_is_full(self) -> bool:
        started = time.monotonic()
        if started < self._next_scratch:
            return False
        self._scratch_bytes = folder_bytes(self.spec.scratch)
        ended = time.monotonic()
        # A large folder is walked less often: a tenth of the time at most.
        self._next_scratch = ended + max(SCRATCH_SECONDS, 10 * (ended - started))
        return self._scratch_bytes > self.spec.limits.file_bytes + self._given

    def _finish(self, report: dict[str, object]) -> None:
        self.launched.kill()
        with contextlib.suppress(OSError):  # the supervisor may be gone: nobody to tell
            self.life.send(json.dumps(report).encode())


def folder_bytes(folder: Path) -> int:
    """What the files below a folder take on disk; an endless folder counts as endless bytes."""
    total = 0
    entries = 0
    todo = [str(folder)]
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as listing:
            for entry in listing:
                entries += 1
                if entries > SCRATCH_ENTRIES:
                    return 1 << 62
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
