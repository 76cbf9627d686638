"""Linux calls that Python 3.11 has no name for, through the C library; each raises OSError when refused.

Constants are those of linux/{sched,mount,prctl,capability}.h, which are the kernel's stable interface.
"""

import ctypes
import os
import platform
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 0x20, 0x400, 0x800, 0x1000, 0x4000
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

X86_64, AARCH64 = "x86_64", "aarch64"
MACHINE = platform.machine()
# Numbers of calls that libc has no wrapper for: (x86_64, aarch64). From 424 on they are the same everywhere.
NUMBERS = {
    "capset": (126, 91),
    "pivot_root": (155, 41),
    "seccomp": (317, 277),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
KNOWN_MACHINE = MACHINE in {X86_64, AARCH64}


def checked(result: int, what: str) -> int:
    """The result of a C call, or its errno as an exception that names the call."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(name: str, *arguments: ctypes.c_void_p | ctypes.Array[ctypes.c_char] | bytes | int | None) -> int:
    """A system call by name. Raises OSError: it is refused, or its number on this processor is not known here."""
    if not KNOWN_MACHINE:
        raise OSError(38, f"{name}: not known on {MACHINE}")  # ENOSYS
    number = NUMBERS[name][0 if MACHINE == X86_64 else 1]
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return checked(LIBC.syscall(ctypes.c_long(number), *words), name)


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` names for new ones."""
    checked(LIBC.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace behind a descriptor; for a PID namespace, only later children do."""
    checked(LIBC.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(
    source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    """Mount, as mount of section 2 of the manual describes."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    checked(LIBC.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def detach(target: str) -> None:
    """Unmount, now or when the last user is gone."""
    checked(LIBC.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def pivot_root_here() -> None:
    """Make the current folder, a mount point, the root, and let go of the old one."""
    syscall("pivot_root", b".", b".")
    detach(".")
    os.chdir("/")


def prctl(option: int, first: int = 0) -> None:
    """Change one property of this process."""
    zero = ctypes.c_ulong(0)
    checked(LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(first), zero, zero, zero), f"prctl {option}")


def restrict_mounts(target: str, flags: int) -> None:
    """Add MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC to a mount and all mounts below it."""
    try:
        # struct mount_attr: attr_set, attr_clr, propagation, userns_fd; these four flags have the same bits here.
        attributes = b"".join(number.to_bytes(8, "little") for number in (flags, 0, 0, 0))
        syscall("mount_setattr", AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, len(attributes))
    except OSError as error:
        if error.errno != 38:  # ENOSYS: kernels before 5.12 take it one mount at a time
            raise
        for point, present in _mounts_below(target):
            mount(None, point, None, MS_BIND | MS_REMOUNT | present | flags)


def _mounts_below(target: str) -> list[tuple[str, int]]:
    """Mount points at and below a folder, with the flags that a remount must repeat."""
    names = {
        "ro": MS_RDONLY,
        "nosuid": MS_NOSUID,
        "nodev": MS_NODEV,
        "noexec": MS_NOEXEC,
        "noatime": MS_NOATIME,
        "nodiratime": MS_NODIRATIME,
        "relatime": MS_RELATIME,
    }
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(" ")
        # Blanks and the like are written in octal: proc(5).
        point = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
        if point == target or point.startswith(target.rstrip("/") + "/"):
            found.append((point, sum(names.get(option, 0) for option in fields[5].split(","))))
    return found


def drop_capabilities() -> None:
    """Give up every capability, also those that an exec as root would bring back."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))
    for capability in range(last + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except PermissionError:  # without CAP_SETPCAP there is nothing in the other sets either
            break
    try:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != 22:  # EINVAL: kernels before 4.3 have no ambient set
            raise
    header = (0x20080522).to_bytes(4, "little") + bytes(4)  # _LINUX_CAPABILITY_VERSION_3, this process
    syscall("capset", header, bytes(24))
