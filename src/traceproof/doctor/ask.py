"""Asking a program something, in bounded time; all that it started has ended when the answer is there."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_RUNNING: set[int] = set()  # process groups, so that an interrupt need not wait for them


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said; `problem` is why that is no answer, empty if it is one."""

    out: str = ""
    problem: str = ""


def ask(
    command: Sequence[str],
    *,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Answer:
    """Run a program and wait for it, at most so long."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            return Answer(problem=error.strerror or str(error))
        _RUNNING.add(process.pid)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Answer(problem=f"no answer within {seconds:g} s")
        finally:
            _end(process.pid)
            process.wait()
            _RUNNING.discard(process.pid)
        out.seek(0)
        err.seek(0)
        said, wailed = (stream.read().decode(errors="replace").strip() for stream in (out, err))
    if code:
        return Answer(problem=_last(wailed) or _last(said) or f"it ended with {code}")
    return Answer(out=said)


def stop() -> None:
    """End all that is being asked: threads that wait for an answer get one."""
    for group in tuple(_RUNNING):
        _end(group)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _last(text: str) -> str:
    return text.splitlines()[-1][:300] if text else ""
