"""Which GPU a job uses: a lease is a lock on a file, so it ends with the process, however that ends.

Several jobs share a GPU as its memory allows: most of a job's time is starting up and preparing, not computing.
"""

import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from traceproof.programs import nvidia_smi
from traceproof.stacks import KERNELS
from traceproof.store import write_text

VARIABLE = "CUDA_VISIBLE_DEVICES"
PLACE_MIB = 1024  # of GPU memory, which leases are counted in
IDLE_SHARE = 8  # one part in so many is for workers that wait for their next job, with the GPU open
# Of such a worker: its context, and what its allocator keeps (`execution.device.KEPT_BYTES`). On an H200 614 MiB
# and 512 MiB, 31 GiB in all with 16 cores, where a few large jobs leave most workers without one.
IDLE_MIB = 1126
LARGE = 3  # one part in so many is a large job's: others are small beside what idle workers may hold
POOLS = len(KERNELS) + 2  # of workers: a stack's, the references', the judge's
WORKER_MIB = 4 * 1024  # of GPU memory for each process that a stack may have
POLL_SECONDS = 0.05
# For which a job that waits for room lets others pass: their packages take as long to import.
PASSED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    index: str
    memory_mib: int
    uuid: str = ""  # the same in every process, unlike the index where a process is shown some GPUs alone

    @property
    def name(self) -> str:
        """What its lock files are called by."""
        return self.uuid or self.index

    def named(self, assigned: str) -> bool:
        """Whether a list as CUDA reads it names this one: by its number, or by the beginning of its UUID."""
        words = assigned.split(",")
        return self.index in words or any(len(word) > 4 and self.uuid.startswith(word) for word in words)

    @property
    def places(self) -> int:
        """How many units of memory jobs share."""
        return max(1, (self.memory_mib - self.memory_mib // IDLE_SHARE) // PLACE_MIB)


def gpus(folder: Path | None = None) -> list[Gpu]:
    """The GPUs of this machine; none where there is no driver, or it does not answer.

    Args:
        folder: where the jobs of a run keep the answer, which takes a driver up to a second; None: nowhere.
    """
    if folder is None or not folder.is_dir():
        return _asked()
    with (folder / "gpus.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        kept = folder / "gpus.json"
        if kept.is_file():
            return [Gpu(*said) for said in json.loads(kept.read_text(encoding="utf-8"))]
        found = _asked()
        if found:
            write_text(kept, json.dumps([[gpu.index, gpu.memory_mib, gpu.uuid] for gpu in found]))
        return found


def _asked() -> list[Gpu]:
    rows = nvidia_smi("index,memory.total,uuid")
    return [Gpu(index, int(memory), uuid) for index, memory, uuid in rows]


def workers(found: Sequence[Gpu]) -> int:
    """How many processes of a stack may have the GPUs open: a driver opens a GPU for one after the other."""
    room = sum(gpu.memory_mib for gpu in found) // WORKER_MIB
    return max(1, min(room, len(os.sched_getaffinity(0))) // 4)


@contextmanager
def lease(
    found: Sequence[Gpu] | None = None, *, memory_mib: int = 0, folder: Path | None = None
) -> Iterator[str | None]:
    """Wait for room on a GPU, the emptiest first, and point CUDA at it; gives its index.

    Gives None and changes nothing where there is no GPU, or none that somebody has assigned: a batch system, or
    whoever started this. Of several assigned ones, it gives one; a single one is waited for and named as it was.
    A job that none has room for gets a whole one; one that wants a third leaves more to idle workers. Lock files
    lie in the temporary folder unless another is given, for all runs of this user. They are called by the GPU's
    UUID, since a batch system may give two jobs of a machine different GPUs under one number.
    """
    assigned = os.environ.get(VARIABLE)
    available = gpus() if found is None else list(found)
    if assigned is not None:
        available = [gpu for gpu in available if gpu.named(assigned)]
    if not available:
        yield None
        return
    folder = folder or _folder()
    wanted, spare = max(1, math.ceil(memory_mib / PLACE_MIB)), _spare(available)
    place, locks = _wait(available, wanted, spare if LARGE * wanted > available[0].places else 0, folder)
    os.environ[VARIABLE] = place.index if assigned is None or "," in assigned else assigned
    try:
        yield place.index
    finally:
        if assigned is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = assigned
        _release(locks)


def _locked(path: Path, how: int) -> int | None:
    """A lock on a file; None: somebody else has it, and it was not to be waited for."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, how)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"traceproof-gpus-{os.getuid()}"


def _spare(found: Sequence[Gpu]) -> int:
    """Units of a GPU's memory that idle workers may hold beyond the share that is theirs."""
    held = POOLS * workers(found) * IDLE_MIB - sum(gpu.memory_mib // IDLE_SHARE for gpu in found)
    return max(0, math.ceil(held / (PLACE_MIB * len(found))))


def _wait(available: Sequence[Gpu], wanted: int, spare: int, folder: Path) -> tuple[Gpu, list[int]]:
    """Places on the GPU that has most of them free, and so many to spare.

    A job that has waited for long is passed by no other.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    turn = os.open(folder / "turn.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    patient = time.monotonic() + PASSED_SECONDS
    try:
        while True:
            fcntl.flock(turn, fcntl.LOCK_EX)
            free = {gpu: _take(gpu, folder) for gpu in available}
            chosen = max(available, key=lambda gpu: len(free[gpu]))
            enough = min(wanted + spare, chosen.places)
            kept = free[chosen][: min(wanted, chosen.places)] if len(free[chosen]) >= enough else []
            _release([lock for locks in free.values() for lock in locks if lock not in kept])
            if kept:
                return chosen, kept
            if time.monotonic() < patient:
                fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(POLL_SECONDS)
    finally:
        os.close(turn)


def _take(gpu: Gpu, folder: Path) -> list[int]:
    """Locks on the GPU's free places."""
    taken = []
    for number in range(gpu.places):
        lock = _locked(folder / f"{gpu.name}-{number}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is not None:
            taken.append(lock)
    return taken


def _release(locks: Sequence[int]) -> None:
    for lock in locks:
        os.close(lock)
