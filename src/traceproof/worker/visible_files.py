"""What a shut-in worker can see of the file system, and the new root that shows just that."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from traceproof.worker import kernel

# Installed software; libraries and programs, nobody's data.
_SYSTEM = "/usr /bin /sbin /lib /lib32 /lib64 /libx32 /opt /nix/store /gnu/store /sys"
SYSTEM = tuple(_SYSTEM.split())
# Of /etc, only what loading a library or naming a time zone or a user needs: the rest may hold keys.
_ETC = "alternatives group ld.so.cache ld.so.conf ld.so.conf.d localtime nsswitch.conf passwd"
ETC = tuple(_ETC.split())
DEVICES = ("null", "zero", "full", "random", "urandom")  # below /dev
GPU_DEVICES = ("nvidia*", "dxg")
# Of /proc, what changes the machine: the owner of these files, root, needs no capability to write to them.
MACHINE_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
SHARED = "/dev/shm"  # noqa: S108 - a small one of the worker's own
SHARED_MEMORY = "size=64m,mode=1777"  # what CUDA and semaphores put into /dev/shm is small


@dataclass(frozen=True, slots=True)
class VisibleFiles:
    """Paths that a worker keeps: to read, to write (its scratch folder), device nodes; and what it never sees."""

    readable: tuple[str, ...]
    scratch: str
    devices: tuple[str, ...]
    concealed: tuple[str, ...] = ()

    def concealing(self, paths: Sequence[str]) -> "VisibleFiles":
        """The view without what lies in some folders, but for a folder that the interpreter itself lies in."""
        own = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.executable)]
        hidden = [path for path in paths if not any(_inside(one, path) for one in own)]
        kept = [path for path in self.readable if not any(_inside(path, folder) for folder in hidden)]
        return VisibleFiles(tuple(kept), self.scratch, self.devices, tuple(hidden))


def view_of_this_process(scratch: str, *, gpu: bool, more: Sequence[str] = ()) -> VisibleFiles:
    """The view that this interpreter needs: its own files, the libraries it has loaded, and `more`."""
    wanted = [*SYSTEM, *(f"/etc/{name}" for name in ETC), *more]
    wanted += [sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.path.realpath(sys.executable)).parent)]
    wanted += [path for path in sys.path if path]
    for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH"):
        wanted += [path for path in os.environ.get(name, "").split(os.pathsep) if path]
    wanted += _folders_of_loaded_libraries()
    patterns = (*DEVICES, *(GPU_DEVICES if gpu else ()))
    devices = [str(path) for pattern in patterns for path in sorted(Path("/dev").glob(pattern))]
    return VisibleFiles(_without_nested(wanted), scratch, tuple(devices))


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _folders_of_loaded_libraries() -> list[str]:
    found = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        path = line.partition("/")[2]
        if ".so" in path:
            found.add(os.path.dirname("/" + path))  # noqa: PTH120
    return sorted(found)


def _without_nested(paths: Iterable[str]) -> tuple[str, ...]:
    """The links on the way to the paths and what these resolve to, less what lies inside another of them.

    No path in the result leads through a link, so that making it in a new root never reaches out of that.
    """
    wanted: set[str] = set()
    for path in paths:
        wanted |= _links_and_target(path)
    kept: list[str] = []
    for path in sorted(wanted - {"/"}):
        if not any(path.startswith(other + "/") for other in kept):
            kept.append(path)
    return tuple(kept)


def _links_and_target(path: str) -> set[str]:
    """Every link met while walking to `path`, and where it ends; empty if there is nothing."""
    found = set()
    real = os.path.realpath(path)
    todo = os.path.abspath(path)  # noqa: PTH100 - must not resolve links
    while todo != real:
        parts = todo.split("/")
        link = next(("/".join(parts[:n]) for n in range(2, len(parts) + 1) if _is_link("/".join(parts[:n]))), None)
        if link is None or link in found:
            break
        found.add(link)
        rest = todo[len(link) :]
        todo = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)) + rest)  # noqa: PTH115, PTH118, PTH120
    return found | {real} if Path(real).exists() else set()


def _is_link(path: str) -> bool:
    return Path(path).is_symlink()


def enter(view: VisibleFiles, stage: str, *, fresh_proc: bool) -> None:
    """Build a root that shows the view at `stage`, an empty folder, and move into it. Needs a mount namespace.

    Everything but the scratch folder, a small /dev/shm and files of one's own in /proc is read-only. Raises
    OSError: the kernel refuses a step.
    """
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", stage, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path in view.readable:
        _show(path, stage)
    for path in view.concealed:
        _conceal(stage + path)
    for path in ("/dev", SHARED, "/proc", "/tmp", view.scratch):  # noqa: S108 - an empty /tmp of its own
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
    kernel.mount(view.scratch, stage + view.scratch, None, kernel.MS_BIND)
    kernel.restrict_mounts(stage + view.scratch, own)
    _show_proc(f"{stage}/proc", fresh=fresh_proc)
    os.chdir(stage)
    kernel.pivot_root_here()


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
    """Bind a path at the same place below the stage; a link is made again instead."""
    target = Path(stage + path)
    if _is_link(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(Path(path).readlink())
        return
    _make_point(path, stage)
    with contextlib.suppress(FileNotFoundError):  # gone since the view was made
        kernel.mount(path, str(target), None, kernel.MS_BIND | kernel.MS_REC)


def _conceal(path: str) -> None:
    """Put an empty folder, or an empty file, in the place of what is shown there."""
    if Path(path).is_dir():
        kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    elif Path(path).exists():
        kernel.mount("/dev/null", path, None, kernel.MS_BIND)


def _make_point(path: str, stage: str) -> None:
    """An empty folder or file below the stage for what lies at `path` to be bound to."""
    target = Path(stage + path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
