"""Run a program so that an interrupt stops it cleanly: it gets one signal and the time to finish its clean-up."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from traceproof.pipeline.interrupts import INTERRUPTED, MARK, UNHEARD

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.5
AGAIN_SECONDS = 15.0  # jobs leave within 3 s, and Snakemake's clean-up takes less than that
PATIENCE = 3  # signals after which it is killed


def supervise(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], mark: Path) -> int:
    """Run a command in a process group of its own and give its exit code, INTERRUPTED if it was stopped.

    A terminal sends Ctrl-C to a whole process group, and a second signal in the midst of Snakemake's clean-up
    would break that off. So this process alone gets the user's signals; the first one goes to the group, once.
    What is starting, the command or a job, does not hear it, and finds the file `mark`.
    """
    caught: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None) -> None:
        caught.append(number)
        with contextlib.suppress(OSError):  # a full disk: such a job is told again
            mark.touch()
        if started:
            _pass_on(started[0].pid, len(caught))

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'{UNHEARD} exec "$@"', "sh", *command],
            cwd=cwd,
            env={**env, MARK: str(mark)},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        started.append(process)
        if caught:  # before it was there
            _pass_on(process.pid, 1)
        code = _wait(process, caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return INTERRUPTED if caught else code


def _wait(process: subprocess.Popen[bytes], caught: Sequence[int]) -> int:
    """Exit code of a command; one that goes on AGAIN_SECONDS after a signal gets another.

    A program that is still importing may lose the first one: what is imported may catch it.
    """
    told: float | None = None
    while True:
        try:
            return process.wait(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if caught and told is None:
                told = now
            elif told is not None and now - told > AGAIN_SECONDS:
                told = now
                _pass_on(process.pid, 1)


def _pass_on(group: int, count: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        if count == 1:
            os.killpg(group, signal.SIGINT)
        elif count >= PATIENCE:
            os.killpg(group, signal.SIGKILL)
