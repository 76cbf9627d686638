"""Which layers this machine offers, found by trying each once, and how a process shuts itself in with them."""

import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from traceproof.worker import kernel, landlock, seccomp, visible_files

HOLDS = "holds"
ABSENT = "absent: "
LEFT_OUT = ABSENT + "left out on request"
REASON_BYTES = 4096  # a pipe takes that much at once


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationPlan:
    """The layers to put up; those that the machine does not have stay away."""

    user: bool = False
    process: bool = False
    network: bool = False
    ipc: bool = False
    files: bool = False
    privileges: bool = False
    system_calls: bool = False
    landlock: bool = False


NO_LAYERS = IsolationPlan()
LAYERS = {
    "user": "user namespace",
    "process": "process namespace",
    "network": "network namespace",
    "ipc": "IPC namespace",
    "files": "file view of its own",
    "privileges": "no privileges to gain or keep",
    "system_calls": "system call filter",
    "landlock": "Landlock",
}


def line_of(layers: Mapping[str, str]) -> str:
    """The layers in one line for people."""
    holds = [LAYERS[name] for name, state in layers.items() if state == HOLDS]
    absent: dict[str, list[str]] = {}  # by reason: one refusal of the machine often takes several layers
    for name, state in layers.items():
        if state != HOLDS:
            absent.setdefault(state.removeprefix(ABSENT), []).append(LAYERS[name])
    text = "isolation: limits on time, memory, processes and output hold"
    if holds:
        text += "; so do " + ", ".join(holds)
    if absent:
        text += "; absent: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in absent.items())
    if layers.get("network") != HOLDS and layers.get("system_calls") != HOLDS:
        text += "; foreign code CAN reach the network"
    if layers.get("files") != HOLDS and layers.get("landlock") != HOLDS:
        text += "; foreign code CAN read and write this user's files"
    return text


def lacking(layers: Mapping[str, str]) -> list[str]:
    """What strangers' code could reach with these layers; empty: isolation is whole.

    Several layers may do for one protection: a GPU's driver does not start behind Landlock, say.
    """
    holds = {name for name, state in layers.items() if state == HOLDS}
    protections = {
        "this user's files": {"files", "landlock"},
        "the network": {"network", "system_calls"},
        "other processes": {"process", "landlock"},
        "privileges": {"privileges", "user"},
    }
    return [what for what, layers in protections.items() if not holds & layers]


def new_user() -> None:
    """Enter a user namespace of the same user and group, with every capability inside it and none outside."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    with contextlib.suppress(FileNotFoundError):  # kernels before 3.19
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


def new_processes() -> None:
    """Return in the first process of a new PID namespace, with a /proc of its own; the caller waits, then exits.

    Raises OSError: the kernel refuses.
    """
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        os._exit(0 if status == 0 else 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def leave(plan: IsolationPlan, seen: visible_files.VisibleFiles, stage: str) -> None:
    """Enter the namespaces of network, IPC and mounts, and the file view. For `process`, already inside."""
    flags = kernel.CLONE_NEWNET if plan.network else 0
    flags |= kernel.CLONE_NEWIPC if plan.ipc else 0
    flags |= kernel.CLONE_NEWNS if plan.files else 0
    if flags:
        kernel.unshare(flags)
    if plan.files:
        visible_files.enter(seen, stage, fresh_proc=plan.process)


def give_up(plan: IsolationPlan, seen: visible_files.VisibleFiles, *, processes: bool, gpu: bool = False) -> None:
    """Give up privileges, then files and system calls: the last step before foreign code, which nothing undoes."""
    if plan.privileges:
        kernel.drop_capabilities()
    if plan.privileges or plan.landlock or plan.system_calls:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if plan.landlock:
        own = [seen.scratch, visible_files.SHARED] if plan.files else [seen.scratch]  # private only then
        landlock.restrict([*seen.readable, "/proc"], own, seen.devices)
    if plan.system_calls:
        # Without a process namespace it could signal every process of this user, its own monitor first.
        only = None if plan.process else os.getpid()
        seccomp.install(seccomp.program(kernel.MACHINE, processes=processes, only_signal=only, gpu=gpu))


def probe(stage: str, without: Collection[str] = ()) -> tuple[IsolationPlan, dict[str, str]]:
    """Try each layer in a process of its own. Must run in a single thread, before anything heavy is imported.

    `stage` is an empty folder; its parent is one to make others in.
    """
    states: dict[str, str] = {}

    def attempt(layer: str, call: Callable[[], object]) -> None:
        states[layer] = LEFT_OUT if layer in without else outcome_of(call)

    attempt("user", new_user)
    user = states["user"] == HOLDS

    def inside(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: _in_sequence(*([new_user] if user else []), call)

    attempt("network", inside(lambda: kernel.unshare(kernel.CLONE_NEWNET)))
    attempt("ipc", inside(lambda: kernel.unshare(kernel.CLONE_NEWIPC)))
    with tempfile.TemporaryDirectory(dir=Path(stage).parent) as scratch:
        seen = visible_files.view_of_this_process(scratch, gpu=False)
        attempt("files", inside(lambda: leave(IsolationPlan(files=True), seen, stage)))
        attempt("process", inside(lambda: _try_processes(seen, stage)))
        attempt("privileges", inside(lambda: give_up(IsolationPlan(privileges=True), seen, processes=True)))
        attempt("system_calls", lambda: _try_filter(seen))
        attempt("landlock", lambda: give_up(IsolationPlan(landlock=True), seen, processes=True))
    return IsolationPlan(**{name: state == HOLDS for name, state in states.items()}), states


def _in_sequence(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def _try_processes(seen: visible_files.VisibleFiles, stage: str) -> None:
    """Twice, one inside the other, as it will be used: all workers in one, each worker in another."""
    new_processes()
    kernel.unshare(kernel.CLONE_NEWPID)
    problem = outcome_of(lambda: leave(IsolationPlan(files=True, process=True), seen, stage))
    if problem != HOLDS:
        raise OSError(problem.removeprefix(ABSENT))


def _try_filter(seen: visible_files.VisibleFiles) -> None:
    give_up(IsolationPlan(system_calls=True), seen, processes=True)
    try:
        socket.socket(socket.AF_INET).close()
    except PermissionError:
        return
    raise OSError("the filter was taken but does not act")


def outcome_of(call: Callable[[], object]) -> str:
    """Make the call in a forked process: `HOLDS`, or `ABSENT` and the reason."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        word = f"{ABSENT}trying it raised something unexpected".encode()
        try:
            call()
            word = HOLDS.encode()
        except (OSError, KeyError, ValueError) as error:
            word = f"{ABSENT}{error}".encode()
        finally:
            os.write(write, word[:REASON_BYTES])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        said = stream.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return said or f"{ABSENT}trying it ended with status {status}"
