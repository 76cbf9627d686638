"""The process that has imported what jobs need, and forks one for each job of its run; see `job_client`.

Started as `python -m traceproof.pipeline.job_server FD FOLDER OWNER`: a listening socket, a folder of its own, and
the run's process. A connection is one job: its arguments, folder, environment and standard streams come in one
packet, its process id goes back, then its exit code, or less than 0 for the signal that ended it. A client that
hangs up ends its job. The server stays in the process group of the run, so that a job hears an interrupt as any
process of it does.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from traceproof.errors import TraceproofError
from traceproof.owner import Owner
from traceproof.pipeline import entry
from traceproof.pipeline.job_client import RUN, connected
from traceproof.worker import kernel, shared

MODULE = "traceproof.pipeline.job_server"
LOOK_SECONDS = 0.5  # how often it looks whether its run is there
PACKET_BYTES = 1 << 18
STREAMS = 3
PRELOAD = ("traceproof.pipeline.stages.actor", "traceproof.pipeline.stages.judge", "traceproof.pipeline.gpu_lease")


def start(where: Path) -> socket.socket | None:
    """Start a folder's server, unless another job has just done so, and connect to it; None: it can not be had."""
    with contextlib.suppress(OSError, TraceproofError), shared.place(where):
        found = connected(where)
        if found is None:
            shared.start_server(where, MODULE, os.environ[RUN], env=os.environ, session=False)
        return found or connected(where)
    return None


class JobServer:
    """Jobs that run, and who waits for them."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, int] = {}  # the process id of each one's job; 0: not started
        self._wake, self._wake_write = socket.socketpair()
        for end in (self._wake, self._wake_write, listener):
            end.setblocking(False)  # noqa: FBT003 - positional in the standard library
        for end in (self._wake, listener):
            self._selector.register(end, selectors.EVENT_READ)

    def serve(self, owner: Owner) -> None:
        """Run jobs until the run has ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        while owner.alive:
            for key, _ in self._selector.select(LOOK_SECONDS):
                found = key.fileobj
                assert isinstance(found, socket.socket)
                if found is self._listener:
                    self._admit()
                elif found is self._wake:
                    self._tell_ends()
                else:
                    self._hear(found)

    def _admit(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            self._clients[connection] = 0
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, client: socket.socket) -> None:
        """A job to start, or the end of one that nobody waits for."""
        said, streams = b"", list[int]()
        with contextlib.suppress(OSError):
            said, streams, _, _ = socket.recv_fds(client, PACKET_BYTES, STREAMS)
        if said and len(streams) == STREAMS and not self._clients[client]:
            pid = os.fork()
            if pid == 0:
                self._run(said, streams)
            self._clients[client] = pid
            with contextlib.suppress(OSError):
                client.send(str(pid).encode())
        elif not said:
            self._dismiss(client)
        for fd in streams:
            os.close(fd)

    def _dismiss(self, client: socket.socket) -> None:
        pid = self._clients.pop(client)
        self._selector.unregister(client)
        client.close()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _tell_ends(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(PACKET_BYTES):
                pass
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                for client in [client for client, job in self._clients.items() if job == pid]:
                    with contextlib.suppress(OSError):
                        client.send(str(os.waitstatus_to_exitcode(status)).encode())
                    self._clients[client] = 0
                    self._dismiss(client)

    def _run(self, said: bytes, streams: Sequence[int]) -> NoReturn:
        """Be the job, from just after the fork: nothing leads back into the server."""
        code = 1
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in (*self._clients, self._listener, self._wake, self._wake_write):
                own.close()
            self._selector.close()
            for number, fd in enumerate(streams):
                os.dup2(fd, number)
                os.close(fd)
            told: dict[str, Any] = json.loads(said)
            os.environ.clear()
            os.environ.update(told["environment"])
            os.chdir(told["folder"])
            sys.argv[:] = told["arguments"]
            entry.listen()
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - the last frame of a process; what is left is to say it
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)


def main(arguments: Sequence[str]) -> int:
    """Serve, then leave nothing."""
    if os.fork():
        os._exit(0)  # the job that started this goes on
    fd, where, owner = arguments
    gc.disable()  # importing is quicker so
    for name in PRELOAD:
        __import__(name)
    gc.freeze()  # a collection in a job would write to, and so copy, every page of objects
    gc.enable()
    with socket.socket(fileno=int(fd)) as listener:
        listener.set_inheritable(False)
        try:
            JobServer(listener).serve(Owner(owner))
        finally:
            shared.leave(Path(where))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
