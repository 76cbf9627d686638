"""Workers for our own code: a process in some environment's interpreter, which runs one item after the other.

Ground truths run in one per environment (`traceproof.run.trusted`), solutions are judged and generated tests run
in others. At the end is the pool from which untrusted code's workers are forked. Needs no torch.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traceproof
from traceproof.environments import jit
from traceproof.errors import TraceproofError
from traceproof.run.schema import environment_of
from traceproof.sandbox import Limits, Pool, Reply, Status
from traceproof.sandbox.isolation import CUDA_REFUSES
from traceproof.sandbox.kernel import PR_SET_PDEATHSIG, prctl, status_bytes
from traceproof.sandbox.model import TRITON
from traceproof.sandbox.pool import environment, how_it_ended
from traceproof.sandbox.worker import guarded, run_and_exit
from traceproof.stacks import MAIN, STACKS

if TYPE_CHECKING:  # it imports torch
    from traceproof.run.trusted import Implementation

THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
# Prefixes of variables that say where compiled kernels lie and how they are compiled.
CACHES = tuple(prefix for stack in STACKS.values() for prefix in stack.variables)
TOLD = "told"  # key of a message that reports progress and is no answer
OUTPUTS = "outputs at"  # key of an answer: path of a file with tensors, which the caller gets as `outputs`
START_SECONDS = 240.0  # to start an interpreter and import torch, also from a cold network file system
IMPORT_SECONDS = 120.0  # added to the first call's limit on a GPU, as it imports a package and opens the GPU
RUNNER = "traceproof.run.runner"  # imported in the pool for untrusted code
POLL_SECONDS = 0.5  # between checks of a worker's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An interpreter in which implementations run."""

    name: str  # of its stack
    python: str
    # from the rule `stack`: `digest`, `versions`, `device`, `device_type`, `cuda_home`
    record: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)  # for workers, added to those always passed on
    path: tuple[str, ...] = ()  # folders of packages with precedence over installed ones

    @property
    def on_gpu(self) -> bool:
        """Whether its device is a GPU."""
        return self.record.get("device_type") == "cuda"

    def told(self, caches: Path | None) -> dict[str, str]:
        """All environment variables for its workers; `caches` is a folder for what they compile."""
        compiled = jit.environment(caches, self.record, python=self.python) if self.on_gpu and caches else {}
        our_source = Path(traceproof.__file__).resolve().parents[1]
        python_path = os.pathsep.join([*self.path, str(our_source)])
        bytecode = {"PYTHONDONTWRITEBYTECODE": "1"} if self.path else {}  # writes nothing into a user's checkout
        return {**dict.fromkeys(THREADS, "1"), **compiled, "PYTHONPATH": python_path, **bytecode, **self.variables}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything that an engine runs with."""

    # by stack. Without the main one, this interpreter is used; another missing one is not available
    environments: Mapping[str, Environment] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)  # of one call
    build_seconds: float = 0.0  # limit of a kernel build, and of a call that compiles
    dataset: Path | None = None  # root, for blobs of workload lines
    caches: Path | None = None  # for compiled kernels; None: where packages put them
    conceal: Sequence[Path] = ()  # folders that untrusted code must not see, beside the project
    code: str = ""  # digest of our code, for rows
    tolerance: float | None = None  # the user's atol and rtol, which replace the calibrated gates
    figures: bool = True  # whether large outputs that pass get figures
    weak: bool = False  # whether untrusted code may run with incomplete isolation
    alone: bool = False  # whether no other process uses the GPU: what is drawn there is also solved there
    workers: int = 1  # per environment at most
    # by name, functions called as implementations in this process: code that its user trusts (`traceproof.check`)
    functions: Mapping[str, "Implementation"] = field(default_factory=dict)
    # called with (implementation, definition, case, status) of each that ends; from any thread
    progress: Callable[[str, str, str, str], object] = lambda *_: None

    def record(self, name: str) -> Mapping[str, Any]:
        """Record of the environment that an implementation's rows depend on."""
        return self.environments.get(environment_of(name), self.environments[MAIN]).record


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A process of one environment, replaced when it dies; it ends at the latest with the thread that started it.

    The function `setup` (`module:function`) is called in it with the payload; its result is called with each item.
    """

    _starting = threading.Lock()  # else a process started meanwhile would keep this one's socket open

    def __init__(  # noqa: PLR0913 - one process, spelled out
        self,
        environment: Environment,
        setup: str,
        payload: Mapping[str, Any],
        limits: Limits,  # of one item: seconds, bytes
        *,
        caches: Path | None = None,  # for compiled kernels
        told: Callable[[str], object] = lambda _: None,  # called with what the process reports by `tell`
    ) -> None:
        self._environment, self._limits, self._caches, self._told = environment, limits, caches, told
        self._begin, self._lock = (setup, dict(payload)), threading.Lock()
        self._pid = 0
        self._channel: Connection | None = None
        self._baseline = 0  # resident bytes before its first item

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self) -> None:
        """Start it as a fork of this process, which has one thread, this environment and torch imported."""
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            ours.close()
            os.environ.update(self._environment.told(self._caches))
            sys.path[:0], sys.dont_write_bytecode = self._environment.path, True
            run_and_exit(lambda: serve(theirs.detach(), *self._begin))
        theirs.close()
        self._channel = Connection(ours.detach())

    def _start(self) -> None:
        """Start it as a new interpreter."""
        python = self._environment.python
        inherited = {name: value for name, value in os.environ.items() if name.startswith(CACHES)}
        variables = {**inherited, **self._environment.told(self._caches)}
        environ = environment(python=python, env=variables, gpu=self._environment.on_gpu, home=Path.home())
        ours, theirs = socket.socketpair()
        command = [python, "-P", "-m", "traceproof.run.workers", str(theirs.fileno()), json.dumps(self._begin)]
        with self._starting, theirs:
            theirs.set_inheritable(True)
            try:
                self._pid = os.posix_spawn(python, command, environ)
            except OSError as error:
                raise TraceproofError(f"{python} can not be started: {error}") from error
        self._channel = Connection(ours.detach())

    def ask(self, item: Any, seconds: float | None = None) -> Reply:  # noqa: ANN401 - any JSON value
        """Run one item within `seconds`, by default the limit; an answer's `outputs` are tensors."""
        with self._lock:
            started = time.monotonic()
            if self._channel is not None and self._baseline and self._channel.poll():
                self.close()  # it ended since the last item
            if self._channel is None:
                self._start()
            limit = seconds or self._limits.seconds
            if not self._baseline:
                limit += IMPORT_SECONDS if self._environment.on_gpu else 0.0
                ready = self._answer(START_SECONDS)
                if ready.status is not Status.OK:
                    self.close()
                    return replace(ready, message=f"setup: {ready.message}")
                self._baseline = max(1, status_bytes(self._pid, b"VmRSS:"))
            assert self._channel is not None
            with contextlib.suppress(OSError):  # it has ended: the answer says how
                self._channel.send_bytes(json.dumps(item).encode())
            reply = replace(self._answer(limit), seconds=time.monotonic() - started)
            if isinstance(reply.value, dict) and OUTPUTS in reply.value:
                from safetensors.torch import load_file

                reply.value["outputs"] = load_file(reply.value.pop(OUTPUTS))
            return reply

    def _answer(self, seconds: float) -> Reply:
        """Its answer, or how it ended: it is killed if it takes too long or too much memory."""
        assert self._channel is not None
        deadline, allowed = time.monotonic() + seconds, self._limits.memory_bytes
        most_bytes = self._baseline + allowed if allowed is not None and self._baseline else None
        message: dict[str, Any] = {TOLD: ""}
        try:
            while TOLD in message:
                while not self._channel.poll(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        self.close()
                        return Reply(status=Status.TIMEOUT, message=f"not done after {seconds:g} s")
                    if most_bytes is not None and status_bytes(self._pid, b"RssAnon:", b"RssShmem:") > most_bytes:
                        self.close()
                        return Reply(status=Status.MEMORY, message=f"took more than {allowed} bytes of memory")
                message = json.loads(self._channel.recv_bytes())
                if TOLD in message:
                    self._told(message[TOLD])
        except (EOFError, OSError):
            return Reply(status=Status.CRASH, message=how_it_ended(self.close(killing=False)))
        return Reply(**{**message, "status": Status(message["status"])})

    @property
    def runs(self) -> bool:
        """Whether it was started and not ended."""
        return self._channel is not None

    def close(self, *, killing: bool = True) -> int:
        """Close the channel, kill the worker (`killing=False`: wait until it ends by itself) and reap it.

        Returns os.waitpid's raw status; -1 if it was closed or reaped before.
        """
        if self._channel is None:
            return -1
        self._channel.close()
        self._channel, self._baseline = None, 0
        for kill in (os.killpg, os.kill) if killing else ():  # a worker just forked has no process group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self._pid, 0)[1]
        return -1


SERVING: list[Connection] = []  # in a worker: the channel to the process that asks


def tell(text: str) -> None:
    """In a worker, report progress to the process that asks; elsewhere do nothing."""
    for channel in SERVING:
        channel.send_bytes(json.dumps({TOLD: text}).encode())


def serve(descriptor: int, setup: str, payload: Mapping[str, Any]) -> None:
    """Main loop of a worker: set up, then answer items until the other side closes."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with Path(os.devnull).open("r+b") as null:  # packages print
        for stream in (0, 1, 2):
            os.dup2(null.fileno(), stream)
    channel = Connection(descriptor)
    SERVING[:] = [channel]
    module, _, function = setup.partition(":")
    handlers: list[Any] = []
    gc.disable()  # saves a sixth of import time; packages are imported with the first item
    answer = guarded(lambda: handlers.append(getattr(importlib.import_module(module), function)(payload)))
    channel.send_bytes(json.dumps(answer).encode())
    run = handlers[0] if handlers else None
    with contextlib.suppress(EOFError, OSError):
        while run is not None:
            item = json.loads(channel.recv_bytes())
            channel.send_bytes(json.dumps(guarded(lambda item=item: run(item))).encode())  # type: ignore[misc]
            gc.enable()


def untrusted_pool(
    *,
    gpu: bool = False,
    conceal: Sequence[Path] = (),
    weak: bool = True,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> Pool:
    """A pool of workers for untrusted code, with the runner and `preload` imported; they see no more of ours."""
    package = Path(traceproof.__file__).resolve().parent
    source, root = package.parent, package.parents[1]
    clone = (root / "Snakefile").is_file()
    hidden = [root / name for name in ("src", "tests", "examples")] if clone else [package]
    other_copies = {Path(folder).resolve() / package.name for folder in sys.path} - {package}  # of this package
    hidden += [one for one in other_copies if one.is_dir()]
    env = {**(environment or {}), **dict.fromkeys(THREADS, "1"), "PYTHONPATH": str(source)}
    return Pool(
        preload=("torch", *preload, RUNNER),
        conceal=[*hidden, *conceal],
        env=env,
        gpu=gpu,
        readable=[Path(env[TRITON])] if TRITON in env else [],
        without=CUDA_REFUSES if gpu else (),
        weak=weak,
    )


if __name__ == "__main__":
    # so that later imports of this module find it under its name, not as `__main__`
    importlib.import_module("traceproof.run.workers").serve(int(sys.argv[1]), *json.loads(sys.argv[2]))
