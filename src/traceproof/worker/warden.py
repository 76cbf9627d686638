"""Watches one worker from outside: what it uses, when it ends; ends it; tells how it ended.

It runs no foreign code. It ends the worker when the supervisor hangs up, so a killed supervisor leaves nothing.
"""

from __future__ import annotations

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
from traceproof.worker.order import Order

# At about 2 GB/s of touching fresh pages, 20 ms overshoot a memory limit by some 40 MB; looking costs 0.2 ms.
LOOK_SECONDS = 0.02
SCRATCH_SECONDS = 0.25  # walking the scratch folder costs more than looking at /proc
SCRATCH_ENTRIES = 100_000  # a folder of more files than this is a flood by itself
WORD_BYTES = 4096
SCRATCH_WORD = b"scratch "  # and a folder: the worker serves another job now


@dataclass(slots=True)
class Warden:
    """The watch over one worker.

    Attributes:
        launched: the worker.
        life: socket to the supervisor: a word there means that a new item begins, its end means "end the worker";
            the report goes back over it.
        order: what the worker may use.
    """

    launched: Launched
    life: socket.socket
    order: Order
    _peak: int = field(default=0, init=False)
    _next_scratch: float = field(default=0.0, init=False)
    _scratch: Path = field(init=False)

    def __post_init__(self) -> None:
        self._scratch = self.order.scratch

    def watch(self) -> None:
        """Return once the worker and everything it started are gone and the report is sent."""
        poll = select.poll()
        for fd in (self.life.fileno(), self.launched.end_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        reason = None
        while reason is None:
            ready = {fd for fd, _ in poll.poll(LOOK_SECONDS * 1000)}
            status = self.launched.wait_status()
            if status is not None:
                self._finish({"reason": "ended", "wait_status": status})
                return
            if self.life.fileno() in ready:
                word = self.life.recv(WORD_BYTES)
                if word.startswith(SCRATCH_WORD):
                    self._scratch = Path(os.fsdecode(word.removeprefix(SCRATCH_WORD)))
                elif word:
                    self._peak = 0
                else:
                    reason = "asked"
            reason = reason or self._excess()
        self._finish({"reason": reason})

    def _excess(self) -> str | None:
        below = self.launched.processes()
        used = sum(max(0, process.private_bytes(pid) - self.launched.baseline) for pid in below)
        self._peak = max(self._peak, used)
        most = self.order.limits.memory_bytes
        if most is not None and used > most:
            return "memory"
        most = self.order.limits.processes
        if most is not None and len(below) - 1 > most:
            return "processes"
        return "scratch" if self._scratch_is_full() else None

    def _scratch_is_full(self) -> bool:
        started = time.monotonic()
        if started < self._next_scratch:
            return False
        full = folder_bytes(self._scratch) > self.order.limits.file_bytes
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
