r"""The started interpreter: imports the heavy modules once and starts a monitor and a worker per request.

    supervisor --- this process (light) --- monitor --- first process of the namespaces (light)
                     \--- heavy zygote --- worker, placed into those namespaces

A process with PyTorch imported costs some 10 ms to fork and to end, a bare one 1 ms; so only the worker is forked
from the heavy one. Where there is no process namespace, this process imports, and the monitor, which is forked
from it, must be the worker's parent.

Started as `python -m traceproof.sandbox.zygote FD ORDER`: a sequenced-packet socket to the supervisor, and JSON
that says whether with a `gpu`, what workers may read beside it (`readable`), which layers to leave out
(`without`), and which `modules` to import. Its working folder is its own. What it imports must not start threads,
run a tensor operation or touch CUDA: no fork would survive that.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceproof.sandbox import kernel
from traceproof.sandbox.isolation import (
    VisibleFiles,
    new_user,
    probe,
    view_of_this_process,
)
from traceproof.sandbox.model import Limits
from traceproof.sandbox.monitor import MOST_NAMESPACES, PACKET_BYTES, Direct, Monitor, Walled
from traceproof.sandbox.worker import WorkerSpec, run_and_exit, work

REQUEST_FDS = 3  # messages, output, life


class CanNotServeError(Exception):
    """This interpreter can start no workers; the text, for the user, says why."""


def main(arguments: Sequence[str]) -> int:
    """Find the layers, import the modules, say so, then serve until the supervisor hangs up."""
    fd, said = arguments
    order = json.loads(said)
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    stage = Path.cwd() / "root"
    stage.mkdir()
    plan, layers = probe(str(stage), order["without"])
    spec = WorkerSpec(
        limits=Limits(),
        plan=plan,
        seen=VisibleFiles(tuple(order["readable"]), "", ()),
        stage=str(stage),
        gpu=order["gpu"],
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the supervisor decides
    heavy = None
    try:
        if plan.process:
            heavy, spec = _start_heavy(spec, order["modules"], control)
        else:
            spec = _preloaded(spec, order["modules"])
    except CanNotServeError as error:
        _say(control, {"error": str(error)})
        return 1
    _say(control, {"ready": True, "layers": layers})
    _serve(control, spec, heavy)
    return 0


def _say(control: socket.socket, message: Mapping[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _preloaded(spec: WorkerSpec, modules: Sequence[str]) -> WorkerSpec:
    """Import, settle, and tell what workers need to see."""
    gc.disable()  # a quarter of the time that importing takes
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = f"{name} can not be imported:\n{traceback.format_exc(limit=-3)}"[-8000:]
            raise CanNotServeError(text) from error
    torch = sys.modules.get("torch")
    names = ", ".join(modules)
    if torch is not None and torch.cuda.is_initialized():
        raise CanNotServeError(f"importing {names} started CUDA, which no forked process can use; preload less")
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise CanNotServeError(
            f"importing {names} left {threads} threads, over which a fork can hang; preload less"
        )
    gc.freeze()  # a collection in a child would write to, and so copy, every page of objects
    gc.enable()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no process of the same user may look into it or its monitors
    return replace(spec, seen=view_of_this_process("", gpu=spec.gpu, more=spec.seen.readable))


def _start_heavy(
    spec: WorkerSpec, modules: Sequence[str], control: socket.socket
) -> tuple[socket.socket, WorkerSpec]:
    """Enter the user namespace that all workers share, and start the heavy zygote beside this light process."""
    if spec.plan.user:
        new_user()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        ours.close()
        run_and_exit(lambda: _heavy(spec, modules, theirs))
    theirs.close()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    said = json.loads(ours.recv(PACKET_BYTES) or b'{"error": "the heavy zygote ended without a word"}')
    if "error" in said:
        raise CanNotServeError(said["error"])
    return ours, replace(spec, seen=VisibleFiles(tuple(said["readable"]), "", tuple(said["devices"])))


def _heavy(spec: WorkerSpec, modules: Sequence[str], requests: socket.socket) -> None:
    try:
        spec = _preloaded(spec, modules)
    except CanNotServeError as error:
        _say(requests, {"error": str(error)})
        return
    _say(requests, {"readable": spec.seen.readable, "devices": spec.seen.devices})
    Heavy(requests, spec).serve()


def _serve(control: socket.socket, spec: WorkerSpec, heavy: socket.socket | None) -> None:
    """Fork a monitor per request. Ends with the supervisor's socket, or with the heavy zygote."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the monitors
    while True:
        ready, _, _ = select.select([control] if heavy is None else [control, heavy], [], [])
        if heavy in ready:  # it says nothing unasked: it is gone
            return
        request, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, REQUEST_FDS)
        if not request:
            return
        if os.fork() == 0:
            control.close()
            run_and_exit(lambda: _guard(spec.told(request), request, fds, heavy))  # noqa: B023 - never returns
        for fd in fds:
            os.close(fd)


def _guard(spec: WorkerSpec, request: bytes, fds: Sequence[int], heavy: socket.socket | None) -> None:
    """The monitor's life: one worker's."""
    channel, output, life = fds
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    data, supervisor = socket.socket(fileno=channel), socket.socket(fileno=life)
    launched: Direct | Walled
    try:
        if heavy is not None:
            launched = Walled(spec, request, data, heavy)
            heavy.close()
        else:
            launched = Direct(spec, data, [supervisor])
    except OSError as error:
        _say(supervisor, {"reason": "failed", "message": str(error)})
        return
    data.close()
    Monitor(launched=launched, life=supervisor, spec=spec).watch()


class Heavy:
    """The zygote that has imported all: forks workers for monitors that are not its children."""

    def __init__(self, requests: socket.socket, spec: WorkerSpec) -> None:
        self._requests, self._spec = requests, spec
        self._baseline = kernel.private_bytes(os.getpid())
        self._monitors: dict[int, socket.socket] = {}
        self._wake, self._wake_write = socket.socketpair()
        for end in (self._wake, self._wake_write):
            end.setblocking(False)  # noqa: FBT003 - positional in the standard library
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork on request until no one is left who could ask."""
        while True:
            ready, _, _ = select.select([self._requests, self._wake], [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(PACKET_BYTES)
                self._tell_ends()
            if self._requests in ready:
                request, fds, _, _ = socket.recv_fds(self._requests, PACKET_BYTES, 3 + MOST_NAMESPACES)
                if not request:
                    return
                self._fork(request, fds)

    def _tell_ends(self) -> None:
        for pid, status in kernel.reap().items():
            monitor = self._monitors.pop(pid, None)
            if monitor is not None:
                with contextlib.suppress(OSError):  # a killed monitor receives nothing
                    monitor.send(str(status).encode())
                monitor.close()

    def _fork(self, request: bytes, fds: list[int]) -> None:
        data, output, reply = fds[:3]
        pid_namespace, *others = fds[3:]
        monitor = socket.socket(fileno=reply)
        kernel.setns(pid_namespace, kernel.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.dup2(output, 1)
            os.dup2(output, 2)
            run_and_exit(lambda: work(self._spec.told(request), socket.socket(fileno=data), others))
        self._monitors[pid] = monitor
        with contextlib.suppress(OSError):
            monitor.send(str(self._baseline).encode())
        for fd in (data, output, pid_namespace, *others):
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
