"""A GPU that one call has to itself for a while, since it waits for the GPU thousands of times.

Where several processes have work for a GPU, it goes from one to the next at each gap between kernels, 0.13 ms per
change on an H200: a wait that takes 0.02 ms alone takes more than 1 ms beside eight others. A sampler's reference,
which waits some four times per draw and row, took twenty times as long. So while such a call runs, others begin
nothing on the GPU, for ALONE_SECONDS of a run: what they import and what the CPU computes takes as long anyway.

It is a courtesy among jobs: nobody waits for longer than that, and nothing depends on who keeps to it.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ALONE_SECONDS = 8.0  # from the first such call of a run on; 0: none has the GPU to itself
POLL_SECONDS = 0.005


@contextmanager
def alone(file: Path, run: str) -> Iterator[None]:
    """Make a call while others begin nothing on the GPU, one such call at a time; later in a run, just make it.

    Args:
        file: of the GPU's lock.
        run: a word that tells runs apart.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = [os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)]

    def release() -> None:
        with contextlib.suppress(IndexError):  # the timer has been here
            os.close(held.pop())

    fcntl.flock(held[0], fcntl.LOCK_EX)
    left = _left(held[0], run)
    if not left:
        release()
    timer = threading.Timer(left, release)  # a call may hang
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        release()


def _left(lock: int, run: str) -> float:
    """Seconds for which calls of a run may still keep others waiting; the file says since when."""
    now = time.time()
    said = os.pread(lock, os.fstat(lock).st_size, 0).decode().split()
    if len(said) != 2 or said[0] != run:
        said = [run, str(now)]
        os.ftruncate(lock, 0)
        os.pwrite(lock, " ".join(said).encode(), 0)
    return max(0.0, min(ALONE_SECONDS, float(said[1]) + ALONE_SECONDS - now))


def admit(file: Path) -> None:
    """Wait while a call has the GPU to itself."""
    until = time.monotonic() + ALONE_SECONDS
    with contextlib.suppress(FileNotFoundError), file.open("rb") as lock:
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
            else:
                return
