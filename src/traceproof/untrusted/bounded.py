"""Bounds on our own code where a stranger's numbers decide how long it takes and how much memory it needs."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PAGE = resource.getpagesize()


@contextmanager
def bounded(*, seconds: float, memory: int) -> Iterator[None]:
    """Let a block take so long and so many bytes beside what the process has; the time in the main thread alone.

    Raises:
        TimeoutError: it took longer.
        MemoryError: it needed more.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * PAGE
    ceiling = used + memory
    for limit in before:
        ceiling = ceiling if limit == resource.RLIM_INFINITY else min(ceiling, limit)
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, before[1]))
    try:
        with _alarm(seconds):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    former = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
