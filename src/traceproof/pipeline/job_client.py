"""Runs a job's script in a fork of the run's job server, which has imported what jobs need.

Started as `python -m traceproof.pipeline.job_client SCRIPT ARGUMENT...`. The imports take a quarter of a second,
most of what a job of few definitions takes. Outside a run, and where no server can be had, the script runs here.
Standard library only, and little of it: each job pays for it.
"""

import contextlib
import hashlib
import json
import os
import runpy
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from traceproof.pipeline.interrupts import was_interrupted

RUN = "TRACEPROOF_RUN"  # as `traceproof.worker.shared` has it
LOST = 1  # exit code where the server ended without a word: a crash
LONGEST_SOCKET = 100  # characters of its path; the kernel takes 107
WORD_BYTES = 1 << 10
# After which a job is told again to end: Python hears no signal that comes just before a call that waits.
AGAIN_SECONDS = 1.0


def folder() -> Path | None:
    """The server's folder, in that of the run; None: this process belongs to no run."""
    owner = os.environ.get(RUN, "")
    run = Path(os.environ.get("TMPDIR", "/tmp"), f"traceproof-{os.getuid()}-{_digest(json.dumps(owner))[:12]}")  # noqa: S108
    recipe = [sys.executable, os.environ.get("PYTHONPATH", ""), str(Path.cwd()), __file__]
    found = run / f"jobs-{_digest(json.dumps(recipe))[:12]}"
    return found if owner and len(str(found / "socket")) <= LONGEST_SOCKET else None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def connected(where: Path) -> socket.socket | None:
    """A connection to the server of this folder; None: there is none."""
    with contextlib.suppress(OSError):
        for found in (where.parent.lstat(), where.lstat()):
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
                return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(where / "socket"))
        except OSError:
            connection.close()
            raise
        return connection
    return None


def _served(arguments: Sequence[str]) -> int | None:
    """Exit code of a script run by the server; None: it was not run."""
    where = folder()
    if where is None:
        return None
    connection = connected(where)
    if connection is None:
        from traceproof.pipeline.job_server import start

        connection = start(where)
    if connection is None:
        return None
    said = {"arguments": list(arguments), "folder": str(Path.cwd()), "environment": dict(os.environ)}
    with connection:
        try:
            socket.send_fds(connection, [json.dumps(said).encode()], [0, 1, 2])
        except OSError:  # longer than a packet may be, or a server that is ending
            return None
        return _waited(connection)


def _waited(connection: socket.socket) -> int:
    """Exit code of the job. A SIGTERM to this process goes to it, as does an interrupt that it did not hear."""
    job = 0
    ended = False  # whether this process was told to end

    def forward() -> None:
        if job and (ended or was_interrupted()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(job, signal.SIGTERM)

    def end(*_: object) -> None:
        nonlocal ended
        ended = True
        forward()

    def word() -> bytes:
        while True:
            with contextlib.suppress(TimeoutError, ConnectionResetError):  # after a reset, b"" follows
                return connection.recv(WORD_BYTES)
            forward()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    connection.settimeout(AGAIN_SECONDS)
    said = word()
    if said:
        job = int(said)
        forward()
        said = word()
    return int(said) if said else LOST


def main(arguments: Sequence[str]) -> int:
    """Run a script, and give its exit code."""
    code = _served(arguments)
    if code is None:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    if code < 0:  # as the shell sees the script's own end
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
