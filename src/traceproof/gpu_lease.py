"""Which GPU a job uses: a lease is a lock on a file, so it ends with the process, however that ends.

Several jobs share a GPU as its memory allows: most of a job's time is starting up and preparing, not computing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
SHARE_MIB = 16 * 1024  # of GPU memory, for one job: twice what the largest medium case was seen to take
MOST = 8  # jobs on one GPU; more do not finish sooner, they wait for each other's launches
POLL_SECONDS = 0.05
QUERY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    index: str
    memory_mib: int

    @property
    def places(self) -> int:
        """How many jobs share it."""
        return max(1, min(MOST, self.memory_mib // SHARE_MIB))


def gpus() -> list[Gpu]:
    """The GPUs of this machine; none where there is no driver, or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=True, text=True, capture_output=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    return [Gpu(index.strip(), int(memory)) for index, memory in rows]


@contextmanager
def lease(found: Sequence[Gpu] | None = None, *, folder: Path | None = None) -> Iterator[str | None]:
    """Wait for a place on a GPU, the emptiest first, and point CUDA at it; gives its index.

    Gives None and changes nothing where there is no GPU, or where somebody has assigned one already: a batch
    system, or whoever started this.

    Args:
        found: the GPUs; None: this machine's.
        folder: of the lock files; None: one in the temporary folder, shared by all runs of this user.
    """
    if os.environ.get(VARIABLE) is not None:
        yield None
        return
    available = gpus() if found is None else list(found)
    if not available:
        yield None
        return
    place, lock = _wait(available, folder or Path(tempfile.gettempdir()) / f"traceproof-gpus-{os.getuid()}")
    os.environ[VARIABLE] = place.index
    try:
        yield place.index
    finally:
        del os.environ[VARIABLE]
        os.close(lock)


def _wait(available: Sequence[Gpu], folder: Path) -> tuple[Gpu, int]:
    """First places of all GPUs before second ones, so that jobs spread."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        for number in range(max(gpu.places for gpu in available)):
            for gpu in available:
                lock = _try(folder / f"{gpu.index}-{number}.lock") if number < gpu.places else None
                if lock is not None:
                    return gpu, lock
        time.sleep(POLL_SECONDS)


def _try(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
