"""Programs that are started: with no secrets they have no use for, asking nothing; and what they said last.

Who may have the hub's token, a word on stderr while something takes long, and bounds on our own code where what a
dataset says decides how long it takes.
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
# Of what is free at the start. A GPU's share is larger: jobs ask for a quarter more than is estimated already, and
# what lacks there costs a case, not the machine.
MEMORY_SHARE, GPU_SHARE = 0.85, 0.95
LAST = 8  # lines of a failed program's output that an error shows; the cause stands last
# Where huggingface_hub looks for one in the environment.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# All that untrusted code gets to know of the user's environment: where programs are, the language, the devices.
HARMLESS = re.compile(
    r"PATH|LANG|LANGUAGE|LC_[A-Z]+|TZ|TERM|TMPDIR|LD_LIBRARY_PATH|CUDA_[A-Z_]+|NVIDIA_[A-Z_]+|OMP_[A-Z_]+|MKL_[A-Z_]+"
    r"|TORCH_[A-Z_]+|TRITON_[A-Z_]+|PYTHONPATH|PYTHONHASHSEED|PYTHONUTF8|PYTHONDONTWRITEBYTECODE|VIRTUAL_ENV"
)
CLEAR = "\r\x1b[K"  # of a terminal's line
LIVE_SECONDS, LINE_SECONDS = 0.1, 5.0  # between states of a line of progress: on a terminal, and elsewhere
FIRST_SECONDS, LONGEST_SECONDS = 3.0, 30.0  # until a wait is told, then after twice as long, at most so long
PAGE = resource.getpagesize()
_TOLD: list[threading.Event] = []  # what is being told, the innermost last


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, its output captured, by default without secrets.

    Raises OSError: it can not be started. subprocess.TimeoutExpired: it took longer than `seconds`.
    """
    given = without_secrets() if environment is None else environment
    own: dict[str, Any] = {"env": given, "cwd": cwd, "timeout": seconds, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, check=False, text=True, capture_output=True, **own)


def nvidia_smi(fields: str, *, units: bool = False) -> list[list[str]]:
    """Fields of each GPU, as nvidia-smi lists them; none where there is no driver, or it does not answer."""
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
    """Have this process see the GPU with the most free memory alone, of equal ones another than others do."""
    rows = [(int(free), uuid) for uuid, free in nvidia_smi("uuid,memory.free") if free.isdigit()]
    if len(rows) > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        best = [uuid for free, uuid in rows if free == max(rows)[0]]
        os.environ["CUDA_VISIBLE_DEVICES"] = best[os.getpid() % len(best)]


def available_memory() -> int:
    """Bytes that programs can still have on this machine."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(next(found, "0")) * 1024


def memory_for_jobs() -> dict[str, int]:
    """MiB that all jobs together may take, by Snakemake's resource: most of what is free, on GPUs too."""
    free = sum(int(size) for (size,) in nvidia_smi("memory.free") if size.isdigit())
    limits = {"mem_mb": int((available_memory() >> 20) * MEMORY_SHARE), "gpu_mb": int(free * GPU_SHARE)}
    return {name: size for name, size in limits.items() if size}


def last_lines(said: str) -> list[str]:
    """The last lines of a program's output, empty ones left out."""
    return [line for line in said.splitlines() if line.strip()][-LAST:]


def forget() -> None:
    """Take the token out of this process's environment, and so out of every program that it starts.

    Processes of the same user may read the environment that a process was started with: it is overwritten there.
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


def without_secrets(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment (this process's) for a program that has no business with tokens: pip, git, our own code."""
    given = os.environ if environment is None else environment
    return {name: value for name, value in given.items() if not says_secret(name)}


def for_untrusted(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment (of this process's) for a program that runs untrusted code: what is known to be harmless.

    HOME, where credentials lie, is not in it.
    """
    given = os.environ if environment is None else environment
    return {name: value for name, value in given.items() if HARMLESS.fullmatch(name) and not says_secret(name)}


class ProgressLine:
    """A line on stderr that says how far something is: rewritten on a terminal, else a new one now and then."""

    def __init__(self, *, every: float = LINE_SECONDS) -> None:
        self._every = every  # seconds between lines where they stay
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()

    def show(self, text: str, *, of: str = "", done: bool = False) -> None:
        """Say how far it is; `of` names one of several things that go on at once, `done` keeps the line."""
        live = sys.stderr.isatty()
        with self._lock:
            now = time.monotonic()
            if not done and now - self._last.get(of, -math.inf) < (LIVE_SECONDS if live else self._every):
                return
            self._last[of] = now
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"{CLEAR}{text[:width]}" + ("\n" if done else "") if live else f"{text}\n")
            sys.stderr.flush()


@contextmanager
def telling(what: object, *, first: float = FIRST_SECONDS, most: float = LONGEST_SECONDS) -> Iterator[None]:
    """Say for how long `what` has been going on: each second on a terminal, else more and more rarely.

    It is asked for its text each time. `most` is the longest wait.
    """
    ended = threading.Event()
    started = time.monotonic()
    live = sys.stderr.isatty()

    def tell() -> None:
        wait = min(first, 1.0) if live else first
        while not ended.wait(wait):
            passed = time.monotonic() - started
            wait = 1.0 if live else min(passed, most)
            if _TOLD[-1] is ended:  # else something within it tells, which says more
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
    """Let a block take so long and so many bytes beside what the process has; the time in the main thread alone.

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
