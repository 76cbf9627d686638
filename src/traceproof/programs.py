"""Starts programs without secrets and without input; shows progress; limits time and memory of our own code.

Also decides which programs may have the hub's token. Limits are for code whose time depends on a dataset's
content.
"""

import ctypes
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from traceproof.text import says_secret

QUERY_SECONDS = 60.0
# Share of the free memory at the start. A GPU's is larger: estimates of jobs include a quarter more, and a lack of
# its memory fails a case, not the machine.
MEMORY_SHARE, GPU_SHARE = 0.85, 0.95
LAST = 8  # lines of a failed program's output in an error; the cause comes last
# Environment variables that huggingface_hub reads.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Environment variables that untrusted code gets: where programs are, the language, devices.
HARMLESS = re.compile(
    r"PATH|LANG|LANGUAGE|LC_[A-Z]+|TZ|TERM|TMPDIR|LD_LIBRARY_PATH|CUDA_[A-Z_]+|NVIDIA_[A-Z_]+|OMP_[A-Z_]+|MKL_[A-Z_]+"
    r"|TORCH_[A-Z_]+|TRITON_[A-Z_]+|PYTHONPATH|PYTHONHASHSEED|PYTHONUTF8|PYTHONDONTWRITEBYTECODE|VIRTUAL_ENV"
)
CGROUP = Path("/sys/fs/cgroup")  # of a container; version 2
CLEAR = "\r\x1b[K"  # of a terminal's line
LIVE_SECONDS, LINE_SECONDS = 0.1, 5.0  # between updates of a line of progress: on a terminal, and elsewhere
# until a wait is first reported, and the longest time between reports, which doubles each time
FIRST_SECONDS, LONGEST_SECONDS = 3.0, 30.0
PAGE = resource.getpagesize()
_TOLD: list[threading.Event] = []  # active `telling` blocks, innermost last


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and capture its output; by default without secrets.

    Raises OSError: it can not be started. subprocess.TimeoutExpired: it took longer than `seconds`.
    """
    options: dict[str, Any] = {"cwd": cwd, "timeout": seconds, "stdin": subprocess.DEVNULL}
    options["env"] = without_secrets() if environment is None else environment
    return subprocess.run(command, check=False, text=True, errors="replace", capture_output=True, **options)


def nvidia_smi(fields: str, *, units: bool = False) -> list[list[str]]:
    """Values of `fields` (comma-separated) for each GPU, from nvidia-smi; [] without a driver or an answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", f"--format=csv,noheader{'' if units else ',nounits'}"]
    try:
        done = subprocess.run(command, check=True, text=True, capture_output=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


def choose_gpu() -> None:
    """Let this process see only the GPU with the most free memory; processes spread over equal ones."""
    rows = [(int(free), uuid) for uuid, free in nvidia_smi("uuid,memory.free") if free.isdigit()]
    if len(rows) > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        best = [uuid for free, uuid in rows if free == max(rows)[0]]
        os.environ["CUDA_VISIBLE_DEVICES"] = best[os.getpid() % len(best)]


def available_memory() -> int:
    """Bytes of memory that programs can still get on this machine, or in this container if that is less."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        sizes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        free = int(next(sizes, "0")) * 1024
    with suppress(OSError, ValueError, KeyError):  # no container, or no limit: "max"
        limit, used = (int((CGROUP / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (CGROUP / "memory.stat").read_text("ascii").splitlines())
        free = min(free, limit - used + int(kinds["inactive_file"]))  # pages of files that the kernel drops first
    return max(0, free)


def memory_for_jobs() -> dict[str, int]:
    """Resource of Snakemake -> MiB that all jobs together may take: most of the free memory, also of GPUs."""
    free = sum(int(size) for (size,) in nvidia_smi("memory.free") if size.isdigit())
    limits = {"mem_mb": int((available_memory() >> 20) * MEMORY_SHARE), "gpu_mb": int(free * GPU_SHARE)}
    return {name: size for name, size in limits.items() if size}


def last_lines(said: str) -> list[str]:
    """The last non-empty lines of a program's output."""
    return [line for line in said.splitlines() if line.strip()][-LAST:]


def forget() -> None:
    """Remove hub tokens from this process's environment, so that programs it starts do not get them.

    Processes of the same user can read the environment that a process was started with: tokens are overwritten
    there.
    """
    for name in HUB_TOKENS:
        os.environ.pop(name, None)
    with suppress(OSError, ValueError, IndexError):  # not Linux, or no /proc
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        place, end = int(fields[47]), int(fields[48])  # env_start and env_end, fields 50 and 51 of proc(5)'s stat
        for entry in ctypes.string_at(place, end - place).split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key.decode(errors="replace") in HUB_TOKENS:
                ctypes.memset(place + len(key) + 1, ord("-"), len(value))
            place += len(entry) + 1


def without_secrets() -> dict[str, str]:
    """This process's environment without secrets: for pip, git, our own code."""
    return {name: value for name, value in os.environ.items() if not says_secret(name)}


def for_untrusted() -> dict[str, str]:
    """This process's harmless variables, for a program that runs untrusted code; HOME is not among them."""
    return {name: value for name, value in without_secrets().items() if HARMLESS.fullmatch(name)}


class ProgressLine:
    """A line of progress on stderr: rewritten on a terminal, else a new line now and then."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()

    def show(self, text: str, *, of: str = "", done: bool = False) -> None:
        """Show progress; `of` names one of several things that go on at once, `done` keeps the line."""
        live = sys.stderr.isatty()
        with self._lock:
            now = time.monotonic()
            if not done and now - self._last.get(of, -math.inf) < (LIVE_SECONDS if live else LINE_SECONDS):
                return
            self._last[of] = now
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"{CLEAR}{text[:width]}" + ("\n" if done else "") if live else f"{text}\n")
            sys.stderr.flush()


@contextmanager
def telling(what: object, *, most: float = LONGEST_SECONDS) -> Iterator[None]:
    """Report on stderr how long `what` has been going on: every second on a terminal, else less and less often.

    `str(what)` is called each time. `most` is the longest wait in seconds.
    """
    ended = threading.Event()
    started = time.monotonic()
    live = sys.stderr.isatty()

    def tell() -> None:
        wait = 1.0 if live else FIRST_SECONDS
        while not ended.wait(wait):
            passed = time.monotonic() - started
            wait = 1.0 if live else min(passed, most)
            if _TOLD[-1] is ended:  # else an inner block reports, which says more
                sys.stderr.write(f"{CLEAR}{what}: {passed:.0f} s" if live else f"{what}: {passed:.0f} s\n")
                sys.stderr.flush()
        if live:
            sys.stderr.write(CLEAR)

    thread = threading.Thread(target=tell, daemon=True)
    _TOLD.append(ended)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _TOLD.remove(ended)


@contextmanager
def bounded(*, seconds: float, memory: int) -> Iterator[None]:
    """Limit a block's seconds (only in the main thread) and the bytes of memory that it takes beyond those in use.

    Raises TimeoutError: it took longer. MemoryError: it needed more.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * PAGE
    ceiling = min([used + memory, *(limit for limit in before if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, before[1]))
    try:
        with _alarm(seconds):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after some seconds; in other threads do nothing. Can be nested."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    former = signal.signal(signal.SIGALRM, ring)
    began, (outer, _) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        if outer:  # seconds that the alarm around this one had left
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer - (time.monotonic() - began)))
