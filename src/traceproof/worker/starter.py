"""Starts hosts of workers for jobs that a batch system runs as steps of one allocation.

A step ends with every process that it started, so a host that outlives it must be started by somebody else: by the
process that was there first in the allocation. Its thread takes orders over a socket, with descriptors.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

NAME = "start"  # of the socket, in the folder of the run
PACKET_BYTES = 1 << 18
DESCRIPTORS = 2  # the host's listening socket, and its log
DONE = b"0"


def run(arguments: Sequence[str], descriptors: Sequence[int], env: Mapping[str, str], *, session: bool) -> None:
    """Run `python -m MODULE FD ARGUMENT...`, which forks and ends at once; FD is the first descriptor's number.

    The descriptors are a listening socket and the log; `session` tells whether it leaves this process's session.
    Raises subprocess.CalledProcessError: it fails.
    """
    module, *others = arguments
    listener, log = descriptors
    subprocess.run(
        [sys.executable, "-P", "-m", module, str(listener), *others],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[listener],
        start_new_session=session,
        check=True,
        env=env,
    )


def ask(folder: Path, arguments: Sequence[str], descriptors: Sequence[int], env: Mapping[str, str]) -> bool:
    """Have the run's starter do it; False: there is none, or it could not."""
    order = json.dumps({"arguments": list(arguments), "env": dict(env)})
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(folder / NAME))
        socket.send_fds(connection, [order.encode()], descriptors)
        return connection.recv(len(DONE)) == DONE
    return False


def serve(folder: Path) -> None:
    """Take orders until this process ends; the folder must be private."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / NAME))
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            _obey(connection)


def _obey(connection: socket.socket) -> None:
    said, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, DESCRIPTORS)
    try:
        order = json.loads(said)
        run(order["arguments"], descriptors, order["env"], session=True)
        connection.send(DONE)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
