"""Watches one worker from outside: what it uses, when it ends; ends it; tells how it ended.

It runs no foreign code. It ends the worker when the supervisor hangs up, so a killed supervisor leaves nothing.
"""

import contextlib
import json
import os
import select
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from traceproof.worker import process
from traceproof.worker.launch import Launched
from traceproof.worker.model import Isolation
from traceproof.worker.spec import WorkerSpec

# The next look comes before the worker can have passed its memory limit, were several cores to touch fresh pages,
# but not sooner than 20 ms (at 2 GB/s per thread, 40 MB of overshoot): a look costs about 0.3 ms of a core.
FRESH_BYTES_PER_SECOND = 8e9
LEAST_LOOK_SECONDS = 0.02
MOST_LOOK_SECONDS = {Isolation.UNTRUSTED: 0.05, Isolation.TRUSTED: 0.25}
IDLE_LOOK_SECONDS = 0.25  # between two items, for threads that strangers' code may have left running
SCRATCH_SECONDS = 0.25  # walking the scratch folder costs more than looking at /proc
SCRATCH_ENTRIES = 100_000  # a folder of more files than this is a flood by itself
WORD_BYTES = 4096
IDLE_WORD = b"idle"  # the item was answered
SCRATCH_WORD = b"scratch "  # and a folder: the worker serves another job now


@dataclass(slots=True)
class Monitor:
    """The watch over one worker."""

    launched: Launched  # the worker
    # socket to the supervisor: a word there means that an item begins or was answered, its end means "end the
    # worker"; the report goes back over it
    life: socket.socket
    spec: WorkerSpec  # what the worker may use
    _peak: int = field(default=0, init=False)
    _next_scratch: float = field(default=0.0, init=False)
    _scratch: Path = field(init=False)
    _used: int = field(default=0, init=False)
    _idle: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._scratch = self.spec.scratch

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
                if word.startswith(SCRATCH_WORD):
                    self._scratch = Path(os.fsdecode(word.removeprefix(SCRATCH_WORD)))
                elif word:
                    self._idle = word == IDLE_WORD
                    self._peak = self._peak if self._idle else 0
                    if not self._idle:
                        continue  # an item begins: the look when it ends, or in a moment, tells more
                else:
                    reason = "asked"
            reason = reason or self._excess()
        self._finish({"reason": reason})

    def _pause(self) -> float | None:
        """Milliseconds until the next look; None: there is nothing to look for before the next word or the end."""
        if self._idle:
            trusted = self.spec.isolation is Isolation.TRUSTED and self.launched.end_fd >= 0
            return None if trusted else IDLE_LOOK_SECONDS * 1000
        longest = MOST_LOOK_SECONDS[self.spec.isolation]
        most = self.spec.limits.memory_bytes
        left = longest if most is None else (most - self._used) / FRESH_BYTES_PER_SECOND
        return max(LEAST_LOOK_SECONDS, min(longest, left)) * 1000

    def _excess(self) -> str | None:
        below = self.launched.processes()
        used = sum(max(0, process.private_bytes(pid) - self.launched.baseline) for pid in below)
        self._used, self._peak = used, max(self._peak, used)
        most = self.spec.limits.memory_bytes
        if most is not None and used > most:
            return "memory"
        most = self.spec.limits.processes
        if most is not None and len(below) - 1 > most:
            return "processes"
        return "scratch" if self._scratch_is_full() else None

    def _scratch_is_full(self) -> bool:
        started = time.monotonic()
        if started < self._next_scratch:
            return False
        full = folder_bytes(self._scratch) > self.spec.limits.file_bytes
        ended = time.monotonic()
        # A large folder is walked less often: a tenth of the time at most.
        self._next_scratch = ended + max(SCRATCH_SECONDS, 10 * (ended - started))
        return full

    def _finish(self, report: dict[str, object]) -> None:
        self.launched.kill()
        with contextlib.suppress(OSError):  # the supervisor may be gone: nobody to tell
            self.life.send(json.dumps(report | {"peak": self._peak}).encode())


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
