"""What a pool starts: an interpreter that imports modules once, then forks a guard and a worker per request.

 supervisor --- this interpreter --- guard, the first process of namespaces of its own --- worker

The supervisor is the pool's process. The guard runs no foreign code. It makes the namespaces and the file view,
forks the worker, watches the resources of all processes in there (its descendants, without process namespaces
too), ends them at an excess or when the supervisor hangs up, and reports how the worker ended.

Started as `python -m traceproof.sandbox.worker FD ORDER`: a sequenced-packet socket to the supervisor, and JSON
with `gpu` (whether to use it), `readable` (further paths that workers may read), `without` (layers to leave out)
and `modules` to import. Its working folder is its own. The modules must not start threads, run a tensor operation
or touch CUDA on import: none of that survives a fork.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self

from traceproof.sandbox import isolation, kernel
from traceproof.sandbox.model import ANSWERED, ITEM, LENGTH, MIB, PACKET_BYTES, Limits, Status, encode, receive

Handler = Callable[[Any], Any]

REQUEST_FDS = 3  # messages, output, life
# The next check comes before several cores can have touched fresh pages up to the memory limit, but not sooner
# than 20 ms (at 2 GB/s per thread, 40 MB of overshoot): a check costs about 0.3 ms of a core.
FRESH_BYTES_PER_SECOND = 8e9
LEAST_LOOK_SECONDS, MOST_LOOK_SECONDS = 0.02, 0.05
IDLE_LOOK_SECONDS = 0.25  # between items, as threads of untrusted code may still run
FAILED_LOOKS = 3  # checks that may fail in turn
_WHAT = "a removed file that is mapped and not open, too long a path, or a program that nobody may read"
HIDDEN = f"kept its guard from seeing what it holds: {_WHAT}"
SCRATCH_SECONDS = 0.25  # walking the scratch folder costs more than reading /proc
IN_MEMORY = "/memfd:"  # how /proc shows files in memory, those of a call among them
SCRATCH_ENTRIES = 100_000  # more files than this count as an excess by themselves
PRIVATE = (b"RssAnon:", b"VmSwap:", b"HugetlbPages:", b"VmPTE:")  # memory of a process's own, by its status
TRACEBACK_FRAMES = 8  # the innermost ones; a deep recursion has a thousand
MESSAGE_CHARACTERS = 4000
# Texts of allocators that are out of host or GPU memory; on a CPU PyTorch raises a plain RuntimeError.
MEMORY_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
GUARDS_SECONDS = 4.0  # for those whose supervisor has gone, to end their workers; less than STOP_SECONDS
OPEN_FILES = 1024
# RLIMIT_NPROC counts threads, too; a thread pool starts one per core, and PyTorch has several pools.
THREADS_PER_CORE, THREADS_BESIDE = 4, 256
STACK_BYTES = 8 * MIB  # per thread: RLIMIT_DATA counts it though it is hardly touched


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A request for a worker, with what is common to all requests."""

    limits: Limits
    plan: frozenset[str]  # the layers that this machine has
    seen: isolation.VisibleFiles  # the worker's view of files, if the plan has one
    stage: str  # an empty folder to build that view at
    gpu: bool

    @property
    def scratch(self) -> Path:
        """The worker's own folder."""
        return Path(self.seen.scratch)

    def told(self, request: bytes) -> Self:
        """The spec of one worker: this one, completed by a request's JSON."""
        said = json.loads(request)
        seen = isolation.VisibleFiles(self.seen.readable, said["at"], self.seen.devices, source=said["scratch"])
        return replace(self, limits=Limits(**said["limits"]), seen=seen.concealing(said["conceal"]))


# The interpreter.


def main(arguments: Sequence[str]) -> int:
    """Probe the layers, import the modules, report both, then serve until the supervisor hangs up."""
    fd, said = arguments
    order = json.loads(said)
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    stage = Path.cwd() / "root"
    stage.mkdir()
    plan, layers = isolation.probe(str(stage), order["without"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the supervisor decides
    if "user" in plan:
        isolation.new_user()  # which all workers share
    if "process" in plan:
        # A process namespace owned by that user namespace: `serve` returns to it by setns, which would be refused
        # for the machine's.
        kernel.call("unshare", kernel.CLONE_NEWPID)
        inner = os.fork()
        if inner:
            control.close()
            return os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if problem := import_all(order["modules"]):
        control.send(json.dumps({"error": problem}).encode())
        return 1
    seen = isolation.view_of_this_process("", gpu=order["gpu"], more=order["readable"])
    control.send(json.dumps({"ready": True, "layers": layers}).encode())
    serve(control, WorkerSpec(limits=Limits(), plan=plan, seen=seen, stage=str(stage), gpu=order["gpu"]))
    return 0


def import_all(modules: Sequence[str]) -> str:
    """Import modules and prepare for forking; returns why no worker can be forked, "" if all is well.

    For `module:function`, the function is called if the module has it.
    """
    gc.disable()  # saves a quarter of the import time
    for name in modules:
        module, _, function = name.partition(":")
        try:
            found = importlib.import_module(module)
            if hasattr(found, function):
                getattr(found, function)()
        except Exception:  # noqa: BLE001 - any error is reported to the user
            return f"{name} can not be imported:\n{traceback.format_exc(limit=-3)}"[-8000:]
    torch, names = sys.modules.get("torch"), ", ".join(modules)
    if torch is not None and torch.cuda.is_initialized():
        return f"importing {names} started CUDA, which no forked process can use; preload less"
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"importing {names} left {threads} threads, over which a fork can hang; preload less"
    sys.dont_write_bytecode = True  # modules imported so far keep their bytecode
    gc.freeze()  # a garbage collection in a child would write to, and so copy, every page of objects
    gc.enable()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no process of the same user may inspect it or its guards
    return ""


def serve(control: socket.socket, spec: WorkerSpec) -> None:
    """Fork a guard per request, each in a new process namespace if the plan has them."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps guards
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    while True:
        request, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, REQUEST_FDS)
        if not request:  # guards die with this process: not before they have ended what their workers left behind
            until = time.monotonic() + GUARDS_SECONDS
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                    time.sleep(0.002)
            return
        channel, output, life = fds
        data, supervisor = socket.socket(fileno=channel), socket.socket(fileno=life)
        with data, supervisor, os.fdopen(output, "wb"):
            try:
                if "process" in spec.plan:
                    kernel.call("unshare", kernel.CLONE_NEWPID)
                if os.fork() == 0:
                    control.close()
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                    run_and_exit(lambda: guard(spec.told(request), data, supervisor))  # noqa: B023 - never returns
                if "process" in spec.plan:
                    kernel.call("setns", own, kernel.CLONE_NEWPID)
            except OSError as error:
                report(supervisor, {"failed": str(error)})


def run_and_exit(call: Callable[[], object]) -> NoReturn:
    """Run all of a forked process's life: no exception and no exit handler gets back to the parent's code."""
    code = 1
    try:
        call()
        code = 0
    except BaseException:  # noqa: BLE001 - the outermost frame of a process: print it
        with contextlib.suppress(Exception):
            traceback.print_exc(file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# The guard.


def guard(spec: WorkerSpec, data: socket.socket, supervisor: socket.socket) -> None:
    """Main function of a guard, which watches one worker. `supervisor` announces items, and gets the report."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        isolation.leave(spec.plan, spec.seen, spec.stage)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        baseline = kernel.status_bytes(os.getpid(), *PRIVATE)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # of the worker, so that it and its guard may see what it holds
        worker = os.fork()
    except OSError as error:
        report(supervisor, {"failed": str(error)})
        return
    if worker == 0:
        supervisor.close()
        run_and_exit(lambda: work(spec, data))
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    data.close()
    said = Guard(worker, baseline, supervisor, spec).watch()
    kernel.kill_all(os.getpid())
    report(supervisor, said)


def report(supervisor: socket.socket, said: Mapping[str, Any]) -> None:
    """Tell the supervisor how a worker ended, if it still listens."""
    with contextlib.suppress(OSError):
        supervisor.send(json.dumps(said).encode())


@dataclass(slots=True)
class Guard:
    """Watches one worker and all its descendants."""

    worker: int  # process id
    baseline: int  # bytes of memory at its start
    supervisor: socket.socket  # a message: an item begins or was answered; its end: "end the worker"
    spec: WorkerSpec  # with the worker's limits
    _next_scratch: float = field(default=0.0, init=False)
    _full: bool = field(default=False, init=False)
    _given: int = field(default=0, init=False)  # bytes of the current item's files
    _held: int = field(default=0, init=False)  # bytes of files in memory
    _used: int = field(default=0, init=False)
    _idle: bool = field(default=False, init=False)
    _failed: int = field(default=0, init=False)  # number of last checks that could not see all

    def watch(self) -> dict[str, Any]:
        """Watch until the worker ends or must be ended; returns the report."""
        poll = select.poll()
        poll.register(self.supervisor.fileno(), select.POLLIN)
        with contextlib.suppress(OSError):  # kernels before 5.3 have none: the regular checks find the end
            poll.register(os.pidfd_open(self.worker), select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._pause())}
            ended = kernel.reap()
            if self.worker in ended:
                return {"wait_status": ended[self.worker]}
            if self.supervisor.fileno() in ready:
                word = self.supervisor.recv(PACKET_BYTES)
                if not word:
                    return {"asked": True}
                self._idle = word == ANSWERED
                if word.startswith(ITEM):
                    self._given, self._held = int(word.removeprefix(ITEM)), 0
                    continue  # the next check comes soon
            try:
                excess, self._failed = self._excess(), 0
            except OSError:  # once or twice: a process ended meanwhile
                self._failed += 1
                excess = (Status.OUTPUT, HIDDEN) if self._failed > FAILED_LOOKS else None
            if excess is not None:
                return {"excess": excess}

    def _pause(self) -> float:
        """Milliseconds until the next check."""
        if self._idle:
            return IDLE_LOOK_SECONDS * 1000
        most = self.spec.limits.memory_bytes
        left = MOST_LOOK_SECONDS if most is None else (most - self._used) / FRESH_BYTES_PER_SECOND
        return max(LEAST_LOOK_SECONDS, min(MOST_LOOK_SECONDS, left)) * 1000

    def _excess(self) -> tuple[Status, str] | None:
        """Status and words if a limit is exceeded; None: none is. Raises OSError: that can not be seen."""
        limits, started = self.spec.limits, time.monotonic()
        below, scratch = kernel.descendants(os.getpid()), self.spec.scratch
        if started >= self._next_scratch:
            self._held = 0 if self.spec.gpu else kernel.removed_bytes(below, IN_MEMORY)  # CUDA's are not open
            self._full = folder_bytes(scratch) + kernel.removed_bytes(below, str(scratch)) > limits.file_bytes
            took = time.monotonic() - started  # a large folder is walked less often: at most a tenth of the time
            self._next_scratch = started + took + max(SCRATCH_SECONDS, 10 * took)
        used = sum(
            max(0, kernel.status_bytes(pid, *PRIVATE) - self.baseline) + kernel.buffer_bytes(pid) for pid in below
        )
        shared = max(self._held, sum(kernel.status_bytes(pid, b"RssShmem:") for pid in below))
        self._used = used + max(0, shared - self._given)
        if limits.memory_bytes is not None and self._used > limits.memory_bytes:
            return Status.MEMORY, f"took more than {limits.memory_bytes} bytes of memory"
        if len(below) - 1 > limits.processes:
            return Status.PROCESSES, f"started more than {limits.processes} processes"
        threads = sum(kernel.status_bytes(pid, b"Threads:") for pid in below) // 1024  # which have no unit
        if threads > most_threads(limits) and not self.spec.gpu:  # CUDA and compilers start their own
            return Status.PROCESSES, f"started more than {most_threads(limits)} threads"
        wrote = f"wrote more than {limits.file_bytes} bytes into its scratch folder"
        return (Status.OUTPUT, wrote) if self._full else None


def folder_bytes(folder: Path) -> int:
    """Bytes on disk of a folder's files; 2^62 if there are more than SCRATCH_ENTRIES or not all can be seen."""
    total, entries, todo = 0, 0, [str(folder)]
    try:
        while todo:
            with contextlib.suppress(FileNotFoundError), os.scandir(todo.pop()) as listing:
                for entry in listing:
                    entries += 1
                    if entries > SCRATCH_ENTRIES:
                        return 1 << 62
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    else:
                        with contextlib.suppress(FileNotFoundError):
                            total += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:  # a path is too long, or nobody may look into it
        return 1 << 62
    return total


# The worker.


def work(spec: WorkerSpec, data: socket.socket) -> None:
    """Main function of a worker, right after its fork into the guard's namespaces."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) not in {0, 1, 2, data.fileno()}:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(name))
    os.environ["HOME"] = os.environ["TMPDIR"] = str(spec.scratch)
    tempfile.tempdir = None  # computed again from TMPDIR
    os.chdir(spec.scratch)
    set_limits(spec)
    isolation.give_up(spec.plan, spec.seen, processes=spec.limits.processes != 0, gpu=spec.gpu)
    answer_all(data, spec)


def most_threads(limits: Limits) -> int:
    """Threads that all processes of a worker may have."""
    return limits.processes + THREADS_BESIDE + THREADS_PER_CORE * (os.cpu_count() or 1)


def set_limits(spec: WorkerSpec) -> None:
    """Set the kernel's limits, which are per process; the guard's are on sums over processes."""
    limits = spec.limits
    values = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: OPEN_FILES}
    values[resource.RLIMIT_FSIZE] = limits.file_bytes
    major, minor, *_ = os.uname().release.replace("-", ".").split(".")
    if "user" in spec.plan and (int(major), int(minor)) >= (5, 14):
        # before 5.14 it counts all processes of the user on the machine; it does not hold for root
        values[resource.RLIMIT_NPROC] = most_threads(limits)
    if limits.memory_bytes is not None and not spec.gpu:
        # A CUDA context reserves hundreds of GB of address space. Without one, an allocation that can not fit
        # raises an exception at once instead of a kill later.
        stacks = THREADS_PER_CORE * (os.cpu_count() or 1) * STACK_BYTES
        values[resource.RLIMIT_DATA] = kernel.status_bytes(os.getpid(), b"VmData:") + limits.memory_bytes + stacks
    for what, value in values.items():
        _, hard = resource.getrlimit(what)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (least, least))


def answer_all(channel: socket.socket, spec: WorkerSpec) -> None:
    """Set up once, then answer items until the supervisor hangs up."""
    held: list[Handler] = []

    def answered(request: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
        if held:
            return held[0](request["item"])
        module, _, function = request["setup"].partition(":")
        held.append(getattr(importlib.import_module(module), function)(request["payload"], spec.scratch))
        return None

    while (request := receive(channel)) is not None:
        answer = guarded(lambda request=request: answered(request))  # type: ignore[misc]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        own, most = {"id": request["id"]}, spec.limits.message_bytes
        try:
            data = encode(answer | own)
        except (TypeError, ValueError, RecursionError) as error:
            data = encode({**own, "status": Status.ERROR, "message": f"the handler's value is not JSON: {error}"})
        if len(data) - LENGTH.size > most:
            said = f"an answer of {len(data)} bytes; the limit is {most}"
            data = encode({**own, "status": Status.OUTPUT, "message": said})
        channel.sendall(data)
        if not held:
            return


def guarded(call: Callable[[], Any]) -> dict[str, Any]:
    """Make a call; whatever it raises becomes an answer, also SystemExit, which would end the worker."""
    try:
        return {"status": Status.OK, "value": call()}
    except BaseException as error:  # noqa: BLE001 - the verdict on untrusted code is made of it
        text = _text_of(error).lower() if isinstance(error, RuntimeError) else ""
        short = isinstance(error, MemoryError) or any(sign in text for sign in MEMORY_SIGNS)
        return {"status": Status.MEMORY if short else Status.ERROR, "message": describe(error)}


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - an untrusted __str__ may raise anything
        return "(its text can not be read)"


def describe(error: BaseException) -> str:
    """An exception and its origin as text, without frames of this package."""
    own, runner = str(Path(__file__).parent), f"{Path(__file__).parents[1]}/run/runner.py"
    with contextlib.suppress(BaseException):
        frames = traceback.extract_tb(error.__traceback__)
        kept = [one for one in frames if not one.filename.startswith(own) and one.filename != runner]
        where = "".join(traceback.format_list(kept[-TRACEBACK_FRAMES:]))
        what = "".join(traceback.format_exception_only(error)).strip()
        return f"{where}{what}"[-MESSAGE_CHARACTERS:]
    return f"{type(error).__name__}: {_text_of(error)}"[-MESSAGE_CHARACTERS:]


if __name__ == "__main__":
    # Taking apart all that PyTorch imported takes half a second, for which the supervisor would wait.
    os._exit(main(sys.argv[1:]))
