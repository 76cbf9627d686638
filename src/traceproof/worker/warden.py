"""The process between the zygote and the worker: watches what the worker uses, ends it, tells how it ended.

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
from traceproof.worker.model import Limits

# At about 2 GB/s of touching fresh pages, 20 ms overshoot a memory limit by some 40 MB; looking costs 0.2 ms.
LOOK_SECONDS = 0.02
SCRATCH_SECONDS = 0.25  # walking the scratch folder costs more than looking at /proc
SCRATCH_ENTRIES = 100_000  # a folder of more files than this is a flood by itself


@dataclass(slots=True)
class Warden:
    """Watches one worker.

    Attributes:
        launched: the worker, and the init of its namespace if it has one.
        life: socket to the supervisor: its end means "end the worker"; the report goes back over it.
        baseline: bytes that every fork of the zygote starts with.
    """

    launched: Launched
    life: socket.socket
    limits: Limits
    scratch: Path
    baseline: int
    peak: int = 0
    _next_scratch: float = field(default=0.0, init=False)

    def watch(self) -> None:
        """Return once the worker and everything it started are gone and the report is sent."""
        poll = select.poll()
        poll.register(self.life, select.POLLIN | select.POLLHUP)
        with contextlib.suppress(OSError):  # kernels before 5.3 have no pidfd: the look below finds the end too
            poll.register(os.pidfd_open(self.launched.top), select.POLLIN)
        reason = None
        while reason is None:
            ready = {fd for fd, _ in poll.poll(LOOK_SECONDS * 1000)}
            ended = process.reap()
            if self.launched.top in ended:
                self._finish({"reason": "ended", "wait_status": self.launched.wait_status(ended[self.launched.top])})
                return
            reason = "asked" if self.life.fileno() in ready else self._excess()
        self._finish({"reason": reason})

    def _excess(self) -> str | None:
        below = [pid for pid in process.descendants(os.getpid()) if pid != self.launched.init]
        used = sum(max(0, process.private_bytes(pid) - self.baseline) for pid in below)
        self.peak = max(self.peak, used)
        if self.limits.memory_bytes is not None and used > self.limits.memory_bytes:
            return "memory"
        if len(below) - 1 > self.limits.processes:
            return "processes"
        now = time.monotonic()
        if now >= self._next_scratch:
            started = time.monotonic()
            full = folder_bytes(self.scratch) > self.limits.file_bytes
            # A large folder is walked less often: never more than a tenth of the time.
            self._next_scratch = now + max(SCRATCH_SECONDS, 10 * (time.monotonic() - started))
            if full:
                return "scratch"
        return None

    def _finish(self, report: dict[str, object]) -> None:
        if self.launched.init is not None:
            self.launched.kill_namespace()
        process.kill_all(os.getpid())
        with contextlib.suppress(OSError):  # the supervisor may be gone: nobody to tell
            self.life.send(json.dumps(report | {"peak": self.peak}).encode())


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
