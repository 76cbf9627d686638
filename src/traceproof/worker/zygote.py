"""The started interpreter: imports the heavy modules once and starts a monitor and a worker per request.

Started as `python -m traceproof.worker.zygote FD ISOLATION GPU READABLE WITHOUT MODULE...`: a sequenced-packet
socket to the supervisor, trusted or untrusted, 0 or 1, folders to show to workers (colons between), layers to
leave out (commas between), and what to import. Its working folder is its own. What it imports must not start
threads, run a tensor operation or touch CUDA: no fork would survive that.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from traceproof.worker import kernel, sandbox
from traceproof.worker.launch import PACKET_BYTES, Direct, Heavy, Launched, Walled
from traceproof.worker.model import NICE, Isolation
from traceproof.worker.monitor import Monitor
from traceproof.worker.spec import WorkerSpec
from traceproof.worker.visible_files import VisibleFiles, view_of_this_process
from traceproof.worker.work import run_and_exit

REQUEST_FDS = 3  # messages, output, life


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line and the probe said."""

    isolation: Isolation
    gpu: bool
    readable: Sequence[str]
    modules: Sequence[str]
    stage: str
    plan: sandbox.IsolationPlan

    def spec_of(self, seen: VisibleFiles) -> Callable[[bytes], WorkerSpec]:
        """Reads requests."""
        return partial(
            WorkerSpec.of_request,
            isolation=self.isolation,
            plan=self.plan,
            seen=seen,
            stage=self.stage,
            gpu=self.gpu,
        )


class CanNotServeError(Exception):
    """This interpreter can start no workers; the text, for the user, says why."""


def main(arguments: Sequence[str]) -> int:
    """Find the layers, import the modules, say so, then serve until the supervisor hangs up."""
    fd, isolation, gpu, readable, without, *modules = arguments
    os.nice(int(os.environ.pop(NICE, "0")))
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    stage = Path.cwd() / "root"
    stage.mkdir()
    plan = sandbox.NO_LAYERS
    layers: dict[str, str] = {}
    if isolation == Isolation.UNTRUSTED:
        plan, layers = sandbox.probe(str(stage), frozenset(without.split(",")))
    readables = [path for path in readable.split(":") if path]
    settings = Settings(Isolation(isolation), gpu == "1", readables, modules, str(stage), plan)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the supervisor decides
    try:
        heavy, seen = _walled(settings, control) if plan.process else (None, _preloaded(settings))
    except CanNotServeError as error:
        _say(control, {"error": str(error)})
        return 1
    _say(control, {"ready": True, "layers": layers})
    _serve(control, settings.spec_of(seen), heavy)
    return 0


def _say(control: socket.socket, message: Mapping[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _preloaded(settings: Settings) -> VisibleFiles:
    """Import, settle, and tell what workers need to see."""
    gc.disable()  # a quarter of the time that importing takes
    for name in settings.modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = f"{name} can not be imported:\n{traceback.format_exc(limit=-3)}"[-8000:]
            raise CanNotServeError(text) from error
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        names = ", ".join(settings.modules)
        raise CanNotServeError(f"importing {names} started CUDA, which no forked process can use; preload less")
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        names = ", ".join(settings.modules)
        raise CanNotServeError(
            f"importing {names} left {threads} threads, over which a fork can hang; preload less"
        )
    gc.freeze()  # a collection in a child would write to, and so copy, every page of objects
    gc.enable()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no process of the same user may look into it or its monitors
    return view_of_this_process("", gpu=settings.gpu, more=settings.readable)


def _walled(settings: Settings, control: socket.socket) -> tuple[socket.socket, VisibleFiles]:
    """Enter namespaces that all workers share, and start the heavy zygote beside this light process."""
    if settings.plan.user:
        sandbox.new_user()
    sandbox.new_processes()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        control.close()
        ours.close()
        run_and_exit(lambda: _heavy(settings, theirs))
    theirs.close()
    said = json.loads(ours.recv(PACKET_BYTES) or b'{"error": "the heavy zygote ended without a word"}')
    if "error" in said:
        raise CanNotServeError(said["error"])
    return ours, VisibleFiles(tuple(said["readable"]), "", tuple(said["devices"]))


def _heavy(settings: Settings, requests: socket.socket) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        seen = _preloaded(settings)
    except CanNotServeError as error:
        _say(requests, {"error": str(error)})
        return
    _say(requests, {"readable": seen.readable, "devices": seen.devices})
    Heavy(requests, settings.spec_of(seen)).serve()


def _serve(control: socket.socket, spec_of: Callable[[bytes], WorkerSpec], heavy: socket.socket | None) -> None:
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
            run_and_exit(lambda: _guard(spec_of(request), request, fds, heavy))  # noqa: B023 - never returns
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
    launched: Launched
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
