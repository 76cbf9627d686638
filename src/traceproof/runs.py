"""Which runs are under way in a results folder, and what they share.

A run is one Snakemake process. It holds a lock on its selection's folder, so that no second one writes there, and
runs of different selections go side by side. What all of them share (environments, records of stacks, the fetched
dataset) is made by one of them while the others wait, and is not made again. Locks are the kernel's: they end with
the process that holds them, however it ends, so none is ever stale.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.owner import Owner, sweep
from traceproof.store import write_json
from traceproof.worker import shared

FOLDER = ".runs"  # below results
LOCKS = Path(".snakemake", "traceproof-locks")  # below the repository: of what runs share
SINCE = "TRACEPROOF_SINCE"  # environment variable: when the run began to look at what is there, seconds since 1970
SCHEDULED = "TRACEPROOF_SCHEDULED"  # environment variable: a batch system runs this job, on another node perhaps
_HELD: list[FileLock] = []  # until this process ends


class Run(BaseModel):
    """What a run says of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    pid: int  # the process to end it by
    started: str  # when, UTC
    folder: str  # of its selection, below results
    environments: str  # digest of the configuration of what it shares with other runs


def begin() -> None:
    """Note when this process looked at what is there: what is newer, another run has made meanwhile."""
    os.environ[SINCE] = str(time.time())


def claim(results: Path, folder: str, *, environments: str) -> None:
    """Hold a selection's folder until this process ends, and remove what killed runs left behind.

    `environments` is the digest of the configuration of what runs share. Raises TraceproofError: another run holds
    it, or one with other environments is under way.
    """
    place = results / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    run = Run(pid=_pid(), started=_now(), folder=folder, environments=environments)
    with _registry(results):
        for other in _under_way(place):
            _check(other, run, results)
        lock = FileLock(place / f"{_slug(folder)}.lock")
        lock.acquire(timeout=0)
        _HELD.append(lock)
        write_json(place / f"{_slug(folder)}.json", run.model_dump())
    for root in (results / "store", Path(tempfile.gettempdir())):
        sweep(root)


def check_free(results: Path, folder: str) -> None:
    """Fail at once where a run of the same selection is under way. Raises TraceproofError: it is."""
    for other in under_way(results):
        if other.folder == folder:
            raise _busy(other)


@contextmanager
def none_under_way(results: Path) -> Iterator[None]:
    """Keep runs from starting; there must be none. Raises TraceproofError: there is one."""
    with _registry(results):
        for other in _under_way(results / FOLDER):
            raise TraceproofError(
                f"a run is under way in {results} (process {other.pid}, since {other.started})",
                todo=f"Wait for it, or end it with `kill {other.pid}`: what it needs must stay.",
            )
        yield


def under_way(results: Path) -> list[Run]:
    """The runs whose processes live."""
    with _registry(results):
        return _under_way(results / FOLDER)


def _registry(results: Path) -> FileLock:
    """The lock that is held while locks are tried: trying one holds it for a moment."""
    (results / FOLDER).mkdir(parents=True, exist_ok=True)
    return FileLock(results / FOLDER / "registry.lock")


def _under_way(place: Path) -> list[Run]:
    found = []
    for path in sorted(place.glob("*.json")):
        try:
            with FileLock(path.with_suffix(".lock"), timeout=0):
                pass  # nobody holds it: its run has ended
        except Timeout:
            found.append(Run.model_validate_json(path.read_text(encoding="utf-8")))
    return found


@contextmanager
def alone(made: Path, *, root: Path = Path()) -> Iterator[bool]:
    """Hold what runs share. Gives whether `made` must be made: not where another run did since this one began."""
    if SCHEDULED in os.environ:  # no locks across nodes: its scheduler started it once, and it comes in one rename
        yield True
        return
    locks, file = root / LOCKS, root / made
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{digest_json(str(made))[:16]}.lock"):
        since = float(os.environ.get(SINCE, "inf"))
        yield not (file.is_file() and file.stat().st_mtime > since)


def _check(other: Run, run: Run, results: Path) -> None:
    if other.folder == run.folder:
        raise _busy(other)
    if other.environments != run.environments:
        raise TraceproofError(
            f"a run with other stacks or models is under way in {results} (process {other.pid}, since "
            f"{other.started})",
            todo=f"Wait for it, end it with `kill {other.pid}`, or give this one another `results` folder.",
        )


def _busy(other: Run) -> TraceproofError:
    return TraceproofError(
        f"a run of this selection is under way (process {other.pid}, since {other.started})",
        todo=f"Wait for it, or end it with `kill {other.pid}`: what it has finished by then is kept. "
        "Other selections may run beside it.",
    )


def _slug(folder: str) -> str:
    return digest_json(folder)[:16]


def _pid() -> int:
    """The command's process where one started this run, else this process."""
    owner = os.environ.get(shared.RUN, "")
    return int(owner.partition(".")[0]) if Owner(owner).alive else os.getpid()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
