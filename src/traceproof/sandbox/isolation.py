"""The layers around untrusted code: which there are, found by trying, how one enters them, its view of files."""

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from traceproof.sandbox import kernel

# Installed software; libraries and programs, nobody's data.
SYSTEM = "/usr /bin /sbin /lib /lib32 /lib64 /libx32 /opt /nix/store /gnu/store /sys"
# Of /etc, only what loading a library or naming a time zone or a user needs: the rest may hold keys.
ETC = "alternatives group ld.so.cache ld.so.conf ld.so.conf.d localtime nsswitch.conf passwd"
DEVICES = ("null", "full", "random", "urandom")  # below /dev
GPU_DEVICES = ("nvidia*", "dxg", "zero")  # /dev/zero gives memory that is counted for no process once it is mapped
# Of /proc, files that change the machine: root, who owns them, needs no capability to write to them.
MACHINE_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "1")  # 1: the guard's priorities
SHARED = "/dev/shm"  # noqa: S108 - a small one of the worker's own
SHARED_MEMORY = "size=64m,nr_inodes=4096,mode=1777"  # what CUDA and semaphores put into /dev/shm is small
# CUDA does not start behind Landlock (cuInit gives 304, seen with driver 580); its private file view remains.
CUDA_REFUSES = ("landlock",)
HOLDS, ABSENT, LEFT_OUT = "holds", "absent: ", "absent: left out on request"
REASON_BYTES = 4096  # at most PIPE_BUF: written to a pipe in one piece


@dataclass(frozen=True, slots=True)
class VisibleFiles:
    """Paths in a worker's file view: readable ones, its scratch folder, device nodes, and concealed ones."""

    readable: tuple[str, ...]
    scratch: str
    devices: tuple[str, ...]
    concealed: tuple[str, ...] = ()
    source: str = ""  # the real folder that appears at `scratch` in a private file view; empty: `scratch` itself

    def concealing(self, paths: Sequence[str]) -> "VisibleFiles":
        """The view without these folders, except one in which the interpreter itself lies."""
        own = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.executable)]
        hidden = [path for path in paths if not any(_inside(one, path) for one in own)]
        kept = [path for path in self.readable if not any(_inside(path, folder) for folder in hidden)]
        return VisibleFiles(tuple(kept), self.scratch, self.devices, tuple(hidden), self.source)

    def apart(self) -> tuple[Sequence[str], Sequence[str]]:
        """Readable paths in which nothing concealed lies, and folders above those, whose names may be read."""
        readable, listed, todo = list[str](), list[str](), [*self.readable]
        for path in todo:
            if not any(_inside(one, path) for one in self.concealed):
                readable.append(path)
            elif path not in self.concealed:
                listed.append(path)
                todo += [one.path for one in os.scandir(path) if not one.is_symlink()]
        return readable, listed


LAYERS = {  # around untrusted code; a machine may lack some
    "user": "user namespace",
    "process": "process namespace",
    "network": "network namespace",
    "ipc": "IPC namespace",
    "files": "file view of its own",
    "privileges": "no privileges to gain or keep",
    "system_calls": "system call filter",
    "landlock": "Landlock",
}


def lacking(layers: Mapping[str, str]) -> list[str]:
    """What untrusted code could reach with these layers, of which several may do for one protection."""
    holds = {name for name, state in layers.items() if state == HOLDS}
    protections = {"this user's files": {"files", "landlock"}, "the network": {"network", "system_calls"}}
    protections |= {"other processes": {"process", "landlock"}, "privileges": {"privileges", "user"}}
    return [what for what, layers in protections.items() if not holds & layers]


def new_user() -> None:
    """Enter a user namespace of the same user and group, with every capability inside it and none outside."""
    user, group = os.geteuid(), os.getegid()
    kernel.call("unshare", kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


def leave(plan: frozenset[str], seen: VisibleFiles, stage: str) -> None:
    """Enter network, IPC and mount namespaces and the file view; in a process namespace, as its first process."""
    flags = kernel.CLONE_NEWNET if "network" in plan else 0
    flags |= kernel.CLONE_NEWIPC if "ipc" in plan else 0
    flags |= kernel.CLONE_NEWNS if {"files", "process"} & plan else 0
    if flags:
        kernel.call("unshare", flags)
    if flags & kernel.CLONE_NEWNS:
        kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    if "files" in plan:
        enter_view(seen, stage, fresh_proc="process" in plan)
    elif "process" in plan:
        _show_proc("/proc", fresh=True)


def give_up(plan: frozenset[str], seen: VisibleFiles, *, processes: bool, gpu: bool = False) -> None:
    """Give up privileges, file access and system calls: the last step before foreign code, and irreversible."""
    if "privileges" in plan:
        kernel.drop_capabilities()
    if {"privileges", "landlock", "system_calls"} & plan:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if "landlock" in plan:
        own = [seen.scratch, SHARED] if "files" in plan else [seen.scratch]  # /dev/shm is private only there
        readable, listed = (seen.readable, ()) if "files" in plan else seen.apart()
        whole = ([*readable, "/proc"], kernel.READ), (own, kernel.WRITE), (seen.devices, kernel.DEVICE)
        kernel.restrict_files([*whole, (listed, kernel.READ_DIR)])
    if "system_calls" in plan:
        # Without a process namespace it could signal every process of this user, its own guard first.
        only = None if "process" in plan else os.getpid()
        # What no other layer keeps out of reach: modes of files, and sockets that have a name.
        beside = [*kernel.FILE_METADATA.values()] if "landlock" in plan and "files" not in plan else []
        beside += [] if {"network", "files"} <= plan else [kernel.SOCKET]
        program = partial(kernel.filter_program, kernel.MACHINE, processes=processes, gpu=gpu)
        kernel.install_filter(program(only_signal=only, beside=beside))


def probe(stage: str, without: Collection[str] = ()) -> tuple[frozenset[str], dict[str, str]]:
    """Try all layers at once, or else each in a process of its own; returns those that hold, and all states.

    Must run in a single thread, with nothing heavy imported. `stage` is an empty folder; others lie beside it.
    """
    with tempfile.TemporaryDirectory(dir=Path(stage).parent) as scratch:
        seen = view_of_this_process(scratch, gpu=False)
        plan = frozenset(LAYERS) - frozenset(without)
        states = {name: LEFT_OUT if name in without else HOLDS for name in LAYERS}
        if outcome_of(lambda: _try_all(plan, seen, stage)) == HOLDS:
            return plan, states
        for name in (one for one in LAYERS if one not in without):  # the user namespace first
            single = {name} | ({"files"} if name == "process" else set())
            single |= {"user"} if states["user"] == HOLDS and name not in {"system_calls", "landlock"} else set()
            states[name] = outcome_of(partial(_try_all, frozenset(single), seen, stage))
    return frozenset(name for name, state in states.items() if state == HOLDS), states


def _try_all(plan: frozenset[str], seen: VisibleFiles, stage: str) -> None:
    """Enter all layers of a plan as a worker does. Raises OSError: one is refused, or has no effect."""

    def inside() -> None:
        leave(plan, seen, stage)
        give_up(plan, seen, processes=True)
        if "system_calls" in plan:
            with contextlib.suppress(PermissionError):
                socket.socket(socket.AF_INET).close()
                raise OSError("the filter was taken but does not act")

    if "user" in plan:
        new_user()
    if "process" not in plan:
        inside()
        return
    kernel.call("unshare", kernel.CLONE_NEWPID)
    problem = outcome_of(inside)
    if problem != HOLDS:
        raise OSError(problem.removeprefix(ABSENT))


def outcome_of(call: Callable[[], object]) -> str:
    """Make a call in a forked process; returns `HOLDS`, or `ABSENT` and the error."""
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


def view_of_this_process(scratch: str, *, gpu: bool, more: Sequence[str] = ()) -> VisibleFiles:
    """The view that this interpreter needs: its own files, the libraries it has loaded, and `more`."""
    wanted = [*SYSTEM.split(), *(f"/etc/{name}" for name in ETC.split()), *more]
    wanted += [sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.path.realpath(sys.executable)).parent)]
    wanted += [path for path in sys.path if path]
    for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH"):
        wanted += [path for path in os.environ.get(name, "").split(os.pathsep) if path]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    loaded = ("/" + line.partition("/")[2] for line in maps if ".so" in line.partition("/")[2])
    wanted += sorted({str(Path(path).parent) for path in loaded})
    patterns = (*DEVICES, *(GPU_DEVICES if gpu else ()))
    devices = [str(path) for pattern in patterns for path in sorted(Path("/dev").glob(pattern))]
    return VisibleFiles(_without_nested(wanted), scratch, tuple(devices))


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _without_nested(paths: Iterable[str]) -> tuple[str, ...]:
    """Every link on the way to the paths and their resolved targets, without those that lie inside another one.

    No path in the result leads through a link, so creating it below a new root never reaches outside of that.
    """
    wanted = {one for path in paths for one in _links_and_target(path)}
    kept: list[str] = []
    for path in sorted(wanted - {"/"}):
        if not any(path.startswith(other + "/") for other in kept):
            kept.append(path)
    return tuple(kept)


def _links_and_target(path: str) -> set[str]:
    """Every link met on the way to `path`, and its resolved target; empty if it does not exist."""
    found = set()
    real = os.path.realpath(path)
    todo = os.path.abspath(path)  # noqa: PTH100 - must not resolve links
    while todo != real:
        parts = todo.split("/")
        above = ("/".join(parts[:count]) for count in range(2, len(parts) + 1))
        link = next((one for one in above if Path(one).is_symlink()), None)
        if link is None or link in found:
            break
        found.add(link)
        rest = todo[len(link) :]
        todo = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)) + rest)  # noqa: PTH115, PTH118, PTH120
    return found | {real} if Path(real).exists() else set()


def enter_view(view: VisibleFiles, stage: str, *, fresh_proc: bool) -> None:
    """Build a root that shows the view at `stage`, an empty folder, and move into it. Needs a mount namespace.

    All is read-only but the scratch folder, a small /dev/shm and a process's own files in /proc. Raises OSError:
    the kernel refuses a step.
    """
    kernel.mount("tmpfs", stage, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path in view.readable:
        _show(path, stage)
    for path in view.concealed:
        _conceal(stage + path)
    in_memory = _inside(view.scratch, SHARED)
    for path in ("/dev", SHARED, "/proc", "/tmp", *([] if in_memory else [view.scratch])):  # noqa: S108 - its own
        Path(stage + path).mkdir(parents=True, exist_ok=True)
    for path in view.devices:
        _make_point(path, stage)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        Path(f"{stage}/dev/{name}").symlink_to(f"/proc/self/fd/{number}")
    Path(f"{stage}/dev/fd").symlink_to("/proc/self/fd")
    kernel.restrict_mounts(stage, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    for path in view.devices:
        kernel.mount(path, stage + path, None, kernel.MS_BIND)
    own = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", stage + SHARED, "tmpfs", own | kernel.MS_NOEXEC, SHARED_MEMORY)
    if in_memory:
        Path(stage + view.scratch).mkdir(parents=True)
    kernel.mount(view.source or view.scratch, stage + view.scratch, None, kernel.MS_BIND)
    kernel.restrict_mounts(stage + view.scratch, own)
    _show_proc(f"{stage}/proc", fresh=fresh_proc)
    os.chdir(stage)
    kernel.syscall("pivot_root", b".", b".")
    kernel.checked(kernel.LIBC.umount2(b".", kernel.MNT_DETACH), "umount .")  # lazily: once nobody uses it
    os.chdir("/")


def _show_proc(target: str, *, fresh: bool) -> None:
    if not fresh:
        kernel.mount("/proc", target, None, kernel.MS_BIND | kernel.MS_REC)
        kernel.restrict_mounts(target, kernel.MS_RDONLY)
        return
    kernel.mount("proc", target, "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for name in MACHINE_SETTINGS:
        path = f"{target}/{name}"
        if Path(path).exists():
            kernel.mount(path, path, None, kernel.MS_BIND | kernel.MS_REC)
            kernel.restrict_mounts(path, kernel.MS_RDONLY)


def _show(path: str, stage: str) -> None:
    """Bind a path at the same place below the stage; a link is created again instead."""
    target = Path(stage + path)
    if Path(path).is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(Path(path).readlink())
        return
    _make_point(path, stage)
    with contextlib.suppress(FileNotFoundError):  # gone since the view was made
        kernel.mount(path, str(target), None, kernel.MS_BIND | kernel.MS_REC)


def _conceal(path: str) -> None:
    """Hide what is shown at a path behind an empty folder or file."""
    if Path(path).is_dir():
        kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    elif Path(path).exists():
        kernel.mount("/dev/null", path, None, kernel.MS_BIND)


def _make_point(path: str, stage: str) -> None:
    """Create an empty folder or file below the stage, to which `path` can be bound."""
    target = Path(stage + path)
    target.parent.mkdir(parents=True, exist_ok=True)
    (target.mkdir if Path(path).is_dir() else target.touch)(exist_ok=True)
