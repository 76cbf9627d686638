"""A process with the heavy modules imported, which forks one warden a request and does nothing else.

Started as `python -m traceproof.worker.zygote FD GPU READABLE MODULE...`: a sequenced-packet socket to the
supervisor, 0 or 1, a colon-separated list of folders to show to workers, and what to import. Its working folder
is its own. It must stay a single thread, run no tensor operation and not touch CUDA: no fork would survive that.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traceproof.worker import kernel, process, sandbox
from traceproof.worker.launch import Order, launch, order_of, run_and_exit
from traceproof.worker.view import view_of_this_process
from traceproof.worker.warden import Warden

PACKET_BYTES = 1 << 16


def main(arguments: Sequence[str]) -> int:
    """Find the walls, import the modules, say so, then fork on request until the supervisor hangs up."""
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)  # noqa: FBT003 - positional in the standard library
    gpu, more, modules = arguments[1] == "1", [path for path in arguments[2].split(":") if path], arguments[3:]
    stage = Path.cwd() / "root"
    stage.mkdir()
    plan, layers = sandbox.probe(str(stage))
    problem = _preload(modules)
    if problem is not None:
        _say(control, {"error": problem})
        return 1
    seen = view_of_this_process("", gpu=gpu, more=more)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page of objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the wardens
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the supervisor decides
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no process of the same user may look into it or its wardens
    threads = len(list(Path("/proc/self/task").iterdir()))
    _say(control, {"ready": True, "layers": layers, "threads": threads})
    while True:
        message, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, 3)
        if not message:
            return 0
        pid = os.fork()
        if pid == 0:
            control.close()
            order = order_of(json.loads(message), plan=plan, seen=seen, stage=str(stage))
            run_and_exit(lambda: _guard(order, fds))  # noqa: B023 - never returns
        for fd in fds:
            os.close(fd)
        _say(control, {"pid": pid})


def _say(control: socket.socket, message: Mapping[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _preload(modules: Sequence[str]) -> str | None:
    """Import; the problem in words if something does not import or leaves a state that can not be forked."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - any failure of any import, told to the supervisor
            return f"{name} can not be imported:\n{traceback.format_exc(limit=-3)}"[-8000:]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"importing {', '.join(modules)} started CUDA, which no forked process can use; preload less"
    return None


def _guard(order: Order, fds: Sequence[int]) -> None:
    """The warden's life."""
    channel, output, life = fds
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    baseline = process.private_bytes(os.getpid())
    data, supervisor = socket.socket(fileno=channel), socket.socket(fileno=life)
    launched = launch(order, data, [supervisor])
    data.close()
    Warden(
        launched=launched, life=supervisor, limits=order.limits, scratch=order.scratch, baseline=baseline
    ).watch()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
