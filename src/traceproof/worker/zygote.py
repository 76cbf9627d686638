"""A process with the heavy modules imported, which forks one warden a request and does nothing else.

Started as `python -m traceproof.worker.zygote FD MODULE...`; FD is a sequenced-packet socket to the supervisor.
It must stay a single thread, run no tensor operation and not touch CUDA: a fork would not survive it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traceproof.worker import process
from traceproof.worker.launch import launch, run_and_exit
from traceproof.worker.model import Limits
from traceproof.worker.warden import Warden

PACKET_BYTES = 1 << 16
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LIBC = ctypes.CDLL(None, use_errno=True)


def main(arguments: Sequence[str]) -> int:
    """Import the modules, say so, then fork on request until the supervisor hangs up."""
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)  # noqa: FBT003 - positional in the standard library
    problem = _preload(arguments[1:])
    if problem is not None:
        _say(control, {"error": problem})
        return 1
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page of objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the wardens
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the supervisor decides
    _say(control, {"ready": True})
    while True:
        message, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, 3)
        if not message:
            return 0
        pid = os.fork()
        if pid == 0:
            control.close()
            request: dict[str, Any] = json.loads(message)
            run_and_exit(lambda: _guard(request, fds))  # noqa: B023 - never returns
        for fd in fds:
            os.close(fd)
        _say(control, {"pid": pid})


def _say(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode()[:PACKET_BYTES])


def _preload(modules: Sequence[str]) -> str | None:
    """Import; the problem in words if something does not import or leaves a state that can not be forked."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - any failure of any import, told to the supervisor
            return f"{name} can not be imported:\n{traceback.format_exc(limit=-3)}"[:8000]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"importing {', '.join(modules)} started CUDA, which no forked process can use; preload less"
    return None


def _guard(request: dict[str, Any], fds: Sequence[int]) -> None:
    channel, output, life = fds
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    limits = Limits.of_json(request["limits"])
    scratch = Path(request["scratch"])
    baseline = process.private_bytes(os.getpid())
    data = socket.socket(fileno=channel)
    life_socket = socket.socket(fileno=life)
    launched = launch(data, life_socket, scratch, limits)
    data.close()
    Warden(launched=launched, life=life_socket, limits=limits, scratch=scratch, baseline=baseline).watch()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
