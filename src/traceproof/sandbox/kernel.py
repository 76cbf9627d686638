"""Linux calls that Python 3.11 does not offer, through the C library; each raises OSError when refused.

First namespaces, mounts and capabilities; then Landlock, by which an unprivileged process gives up file access
(since Linux 5.13; later versions add rights, which are used if present); then a BPF program of the system calls
that untrusted code is refused; last, descendants of processes and their memory, by /proc. Constants are those of
linux/{sched,mount,prctl,capability,landlock,filter,seccomp,audit}.h, and of the tables of system calls.
"""

import contextlib
import ctypes
import os
import platform
import re
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from errno import ENOSYS, EPERM
from glob import iglob
from itertools import chain
from pathlib import Path
from typing import TypeVar

LIBC = ctypes.CDLL(None, use_errno=True)
MOUNTS = Path("/proc/self/mountinfo")

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 0x20, 0x400, 0x800, 0x1000, 0x4000
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

X86_64, AARCH64 = "x86_64", "aarch64"
MACHINE = platform.machine()
Numbers = tuple[int | None, int | None]  # of a call: x86_64's and aarch64's
T = TypeVar("T")


def _calls(text: str) -> dict[str, Numbers]:
    """Of `name x86_64 aarch64, ...` numbers by name; `-` where a processor has no such call."""
    calls = (call.split() for call in text.split(","))
    return {name: (int(first), None if second == "-" else int(second)) for name, first, second in calls}


# Calls that libc has no wrapper for. From 424 on numbers are the same everywhere.
NUMBERS = _calls(
    "capset 126 91, pivot_root 155 41, seccomp 317 277, mount_setattr 442 442, landlock_create_ruleset 444 444, "
    "landlock_add_rule 445 445, landlock_restrict_self 446 446"
)


def checked(result: int, what: str) -> int:
    """The result of a C call; a negative one raises OSError by errno, naming the call."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(name: str, *arguments: ctypes.c_void_p | ctypes.Array[ctypes.c_char] | bytes | int | None) -> int:
    """A system call by name. Raises OSError: it is refused, or its number on this processor is not known here."""
    number = dict(zip((X86_64, AARCH64), NUMBERS[name], strict=True)).get(MACHINE)
    if number is None:
        raise OSError(ENOSYS, f"{name}: not known on {MACHINE}")
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return checked(LIBC.syscall(ctypes.c_long(number), *words), name)


def call(name: str, *arguments: int) -> None:
    """Call unshare(flags) or setns(descriptor, kind); a PID namespace is entered only by later children."""
    checked(getattr(LIBC, name)(*map(ctypes.c_int, arguments)), name)


def mount(
    source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    """Mount, as section 2 of the manual describes."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    checked(LIBC.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def prctl(option: int, first: int = 0) -> None:
    """Set one attribute of this process."""
    zero = ctypes.c_ulong(0)
    checked(LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(first), zero, zero, zero), f"prctl {option}")


def restrict_mounts(target: str, flags: int) -> None:
    """Add flags out of MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC to a mount and all mounts below it."""
    try:
        # struct mount_attr: attr_set, attr_clr, propagation, userns_fd; these four flags have the same bits here.
        attributes = b"".join(number.to_bytes(8, "little") for number in (flags, 0, 0, 0))
        syscall("mount_setattr", AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, len(attributes))
    except OSError as error:
        if error.errno != ENOSYS:  # kernels before 5.12 remount one by one
            raise
        for point, present in _mounts_below(target):
            mount(None, point, None, MS_BIND | MS_REMOUNT | present | flags)


def _mounts_below(target: str) -> list[tuple[str, int]]:
    """Mount points at and below a folder, each with the flags that a remount must repeat."""
    flags = (MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME, MS_NODIRATIME, MS_RELATIME)
    names = dict(zip(["ro", "nosuid", "nodev", "noexec", "noatime", "nodiratime", "relatime"], flags, strict=True))
    found = []
    for fields in (line.split(b" ") for line in MOUNTS.read_bytes().split(b"\n")[:-1]):
        # Blanks and other special characters are written in octal: proc(5).
        point = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), fields[4]))
        if point == target or point.startswith(target.rstrip("/") + "/"):
            found.append((point, sum(names.get(option, 0) for option in fields[5].decode().split(","))))
    return found


def drop_capabilities() -> None:
    """Give up every capability, also those that an exec as root would bring back."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))
    for capability in range(last + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except PermissionError:  # without CAP_SETPCAP the other sets are empty, too
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (0x20080522).to_bytes(4, "little") + bytes(4)  # _LINUX_CAPABILITY_VERSION_3, this process
    syscall("capset", header, bytes(24))


EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
DEVICE, WRITE = READ_FILE | WRITE_FILE | IOCTL_DEV, ~(MAKE_CHAR | MAKE_BLOCK)
ON_FILES = EXECUTE | TRUNCATE | DEVICE  # rights that a file can have, not a folder alone
RIGHTS_BY_VERSION = ((1, 13), (2, 14), (3, 15), (5, 16))  # from this version on so many rights
NET_BY_VERSION = (4, 0b11)  # bind and connect of TCP
SCOPE_BY_VERSION = (6, 0b11)  # abstract Unix sockets and signals only among the restricted
VERSION_FLAG, RULE_PATH_BENEATH = 1, 1


def restrict_files(allowed: Iterable[tuple[Iterable[str], int]]) -> None:
    """Leave this process only paths with these rights, those that exist, after no_new_privs. Raises OSError."""
    known = syscall("landlock_create_ruleset", None, 0, VERSION_FLAG)  # of the interface
    handled = (1 << max(count for least, count in RIGHTS_BY_VERSION if known >= least)) - 1
    net = NET_BY_VERSION[1] if known >= NET_BY_VERSION[0] else 0
    scope = SCOPE_BY_VERSION[1] if known >= SCOPE_BY_VERSION[0] else 0
    attributes = struct.pack("=QQQ", handled, net, scope)
    size = 24 if scope else 16 if net else 8  # an older kernel takes the shorter struct
    rules = syscall("landlock_create_ruleset", attributes, size, 0)
    try:
        for paths, rights in allowed:
            for path in paths:
                try:
                    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
                except (FileNotFoundError, PermissionError):
                    continue
                able = rights & handled & (-1 if stat.S_ISDIR(os.fstat(beneath).st_mode) else ON_FILES)
                described = struct.pack("=Qi", able, beneath)
                try:
                    syscall("landlock_add_rule", rules, RULE_PATH_BENEATH, described, 0)
                finally:
                    os.close(beneath)
        syscall("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


AUDIT_ARCH = {X86_64: 0xC000003E, AARCH64: 0xC00000B7}
X32_BIT = 0x40000000  # x86_64's second table of the same calls: refused whole
LOAD, AND, JUMP_EQUAL, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data
FILTER_FLAG_SPEC_ALLOW = 1 << 2  # without it, kernels before 5.16 slow all memory access of the process
SET_MODE_FILTER = 1

CLONE_THREAD, CLONE_FILES, CLOSE_RANGE_UNSHARE = 0x00010000, 0x00000400, 2
CLONE_NEW = 0x7E020080  # every CLONE_NEW* flag of clone(2)
GUARD, AF_UNIX, SOCK_DGRAM, SOCK_RAW, SOCK_TYPES = 1, 1, 2, 3, 0xF  # the first is its id in a process namespace
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # typing into a terminal
FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR = 0x40086602, 0x401C5820  # of any file that can be read
FIOSETOWN, SIOCSPGRP, F_SETOWN, F_SETOWN_EX = 0x8901, 0x8902, 8, 15  # whom a file's events send a signal

REFUSED = _calls(
    # other processes' memory, descriptors and registers
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, kcmp 312 272, "
    "pidfd_getfd 438 438, ioprio_set 251 30, "
    # namespaces and mounts: the layers themselves
    "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, "
    "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, "
    "mount_setattr 442 442, name_to_handle_at 303 264, open_by_handle_at 304 265, "
    # parts of the kernel with a long history of holes and no use here; io_uring also opens sockets unseen
    "bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, "
    "io_uring_register 427 427, add_key 248 217, request_key 249 218, keyctl 250 219, fanotify_init 300 262, "
    "lookup_dcookie 212 18, personality 135 92, "
    # memory that is counted for no process, or is another one's
    "shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, "
    "semget 64 190, semop 65 193, semtimedop 220 192, semctl 66 191, mq_open 240 180, mq_unlink 241 181, "
    "memfd_secret 447 447, landlock_create_ruleset 444 444, "
    # the machine
    "kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, "
    "delete_module 176 106, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60, "
    "syslog 103 116, sethostname 170 161, setdomainname 171 162, settimeofday 164 170, clock_settime 227 112, "
    "clock_adjtime 305 266, adjtimex 159 171, iopl 172 -, ioperm 173 -, modify_ldt 154 -"
)
# Calls that change the process or thread that their first argument names; 0 is the caller.
ON_PROCESSES = _calls(
    "prlimit64 302 261, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274, "
    "sched_setaffinity 203 122"
)
SETPRIORITY = (141, 140)  # likewise its second argument, if the first one is 0
# Memory, and files with their buffers, that are in no process's tables: refused where there is no GPU.
UNSEEN = _calls(
    "memfd_create 319 279, sendmsg 46 211, sendmmsg 307 269, vmsplice 278 75, splice 275 76, tee 276 77, "
    "io_setup 206 0, listen 50 201"
)
# Changes and watches of files that Landlock does not keep to some folders.
FILE_METADATA = _calls(
    "chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, "
    "fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, "
    "lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, "
    "setxattrat 463 463, removexattrat 466 466, file_setattr 469 469, truncate 76 45, inotify_add_watch 254 27"
)
CLONE, CLONE3, FORK, VFORK, OPEN = (56, 220), (435, 435), (57, None), (58, None), (2, None)
OPENAT, OPENAT2, SENDFILE, MMAP = (257, 56), (437, 437), (40, 71), (9, 222)
SHARED_ANONYMOUS = 0x21  # MAP_SHARED and MAP_ANONYMOUS
SETSOCKOPT, SO_SNDBUF = (54, 208), 7
CLOSE_RANGE, SOCKETPAIR = (436, 436), (53, 199)
SOCKET, IOCTL, FCNTL, PRCTL = (41, 198), (16, 29), (72, 25), (157, 167)
KILL_CALL, TGKILL, TKILL = (62, 129), (234, 131), (200, 130)
SIGQUEUE, TGSIGQUEUE, PIDFD_SIGNAL = (129, 138), (297, 240), (424, 424)


def filter_program(  # noqa: C901 - a line per refusal
    machine: str, *, processes: bool, only_signal: int | None, gpu: bool = False, beside: Iterable[Numbers] = ()
) -> bytes:
    """The seccomp filter for a machine (x86_64 or aarch64), as bytes.

    Threads may always be started, processes only with `processes`. `only_signal` is the only process that may be
    sent signals; None: any that is visible. Only with `gpu` may shared memory be mapped, and SENDFILE and UNSEEN.
    `beside`: calls that are refused because no other layer makes them harmless.
    """
    code: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, ARCH_AT),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if machine == X86_64:
        code += [(JUMP_GREATER_EQUAL, 0, 1, X32_BIT), (RETURN, 0, 0, ERRNO | ENOSYS)]

    def refuse(
        call: Numbers, argument: int = 0, *values: int, bits: int = ~0, when: bool = True, error: int = EPERM
    ) -> None:
        """Refuse a call; with values, if it is `when` that `bits` of the argument's low word are one of them."""
        number, refusal = call[(X86_64, AARCH64).index(machine)], (RETURN, 0, 0, ERRNO | error)
        if number is None:
            return
        for value in values:
            # both processors are little-endian: the low word
            word = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), (AND, 0, 0, bits & 0xFFFFFFFF)]
            test = (JUMP_EQUAL, 0, 1, value) if when else (JUMP_EQUAL, 1, 0, value)
            code.extend([(JUMP_EQUAL, 0, 5, number), *word, test, refusal, (LOAD, 0, 0, NUMBER_AT)])
        code.extend([] if values else [(JUMP_EQUAL, 0, 1, number), refusal])

    for numbers in (*REFUSED.values(), *(() if gpu else UNSEEN.values()), *beside):
        refuse(numbers)
    if not gpu:
        refuse(MMAP, 3, SHARED_ANONYMOUS, bits=SHARED_ANONYMOUS)
    if SOCKET in beside:
        refuse(SOCKETPAIR, 1, SOCK_DGRAM, SOCK_RAW, bits=SOCK_TYPES)  # these may send to any name
    alone = only_signal is None  # in a process namespace, with its guard
    for argument, numbers in (*((0, one) for one in ON_PROCESSES.values()), (1, SETPRIORITY)):
        refuse(numbers, argument, GUARD if alone else 0, when=alone)
    refuse(SETPRIORITY, 0, 0, when=False)
    # The flags of the first lie in memory, out of sight; the last holds memory as UNSEEN. Libraries fall back.
    for call in (CLONE3, OPENAT2, *(() if gpu else (SENDFILE,))):
        refuse(call, error=ENOSYS)
    for place, numbers in ((1, OPEN), (2, OPENAT)):  # Landlock before version 3 lets what is read be emptied so
        refuse(numbers, place, os.O_TRUNC, bits=os.O_TRUNC | os.O_ACCMODE)
    refuse(CLONE, 0, 0, bits=CLONE_NEW, when=False)
    # threads with open files of their own, which a guard does not see
    refuse(CLONE, 0, CLONE_THREAD, bits=CLONE_THREAD | CLONE_FILES)
    refuse(CLOSE_RANGE, 2, CLOSE_RANGE_UNSHARE, bits=CLOSE_RANGE_UNSHARE)
    if not processes:
        refuse(CLONE, 0, 0, bits=CLONE_THREAD)
        refuse(FORK)
        refuse(VFORK)
    for call in (SOCKET, SOCKETPAIR):
        refuse(call, 0, AF_UNIX, when=False)
    refuse(SETSOCKOPT, 2, SO_SNDBUF)  # what a guard takes each to hold
    refuse(IOCTL, 1, TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR)
    refuse(FCNTL, 1, F_SETOWN, F_SETOWN_EX)
    refuse(PRCTL, 0, PR_SET_PDEATHSIG, PR_SET_DUMPABLE)
    if only_signal is not None:
        for call in (KILL_CALL, TGKILL, SIGQUEUE, TGSIGQUEUE):
            refuse(call, 0, only_signal, when=False)
        refuse(TKILL)
        refuse(PIDFD_SIGNAL)
    return b"".join(struct.pack("=HBBI", *line) for line in [*code, (RETURN, 0, 0, ALLOW)])


def install_filter(code: bytes) -> None:
    """Bind this process and its children to the filter; needs no_new_privs. Raises OSError: the kernel refuses."""
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: a 16-bit count, padding, a pointer
    described = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    syscall("seccomp", SET_MODE_FILTER, FILTER_FLAG_SPEC_ALLOW, described)


READ_BYTES = 1 << 16  # a status file has 2 KiB
FEW_FILES = 32  # sockets and pipes of a process, up to which they do not count
BUFFER_BYTES = 212_992  # largest default socket buffer: net.core.wmem_default


def _read(path: str) -> bytes:
    """Up to READ_BYTES of a file of /proc; by plain calls, as this is done many times a second."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, READ_BYTES)
    finally:
        os.close(fd)


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of `pid`, parents before children."""
    children: dict[int, list[int]] = {}
    for number in map(int, filter(str.isdigit, os.listdir("/proc"))):  # noqa: PTH208 - called many times a second
        with contextlib.suppress(OSError, IndexError):
            # The command's name may contain spaces and brackets: fields count from the last bracket.
            parent = int(_read(f"/proc/{number}/stat").rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(number)
    found = [pid]
    for one in found:
        found += children.get(one, ())
    return found[1:]


def _found(pid: int, read: Callable[[str], list[T]]) -> list[T]:
    """What `read` finds in a process's folder of /proc; in a thread's if the main one has ended; else nothing."""
    for folder in chain([f"/proc/{pid}"], iglob(f"/proc/{pid}/task/*")):  # noqa: PTH207
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if found := read(folder):
                return found
    return []


def status_bytes(pid: int, *fields: bytes) -> int:
    """Sum of fields of a process's status, such as b"VmRSS:", in bytes; 0 if it has ended."""
    lines = _found(pid, lambda of: [one for one in _read(f"{of}/status").split(b"\n") if one.startswith(fields)])
    return sum(int(line.split()[1]) * 1024 for line in lines)


def _open_files(pid: int) -> Iterator[tuple[str, str]]:
    """(path below /proc, path) of a process's open files. Raises OSError: it does not show them."""
    for file in _found(pid, lambda of: [f"{of}/fd/{name}" for name in os.listdir(f"{of}/fd")]):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):  # closed by now
            yield file, os.readlink(file)  # noqa: PTH115


def buffer_bytes(pid: int) -> int:
    """Upper bound of the bytes in a process's sockets and pipes; 0 if it has few of them. Raises the same."""
    count = sum(path.startswith(("socket:", "pipe:")) for _, path in _open_files(pid))
    return count * BUFFER_BYTES if count > FEW_FILES else 0


def removed_bytes(pids: Iterable[int], folder: str) -> int:
    """Bytes of a folder's removed files that processes have open. Raises OSError: they have others mapped."""
    opened: dict[int, int] = {}  # by inode, as a process that was just forked has the files of another
    for pid in pids:
        for file, path in _open_files(pid):
            if path.startswith(folder):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(file)  # noqa: PTH116
                    opened[status.st_ino] = 0 if status.st_nlink else status.st_blocks * 512
        lines = _found(pid, lambda of: Path(f"{of}/maps").read_bytes().split(b"\n"))
        mapped = (line.split(maxsplit=5) for line in lines if line.endswith(b" (deleted)"))
        if {int(inode) for *_, inode, path in mapped if os.fsdecode(path).startswith(folder)} - opened.keys():
            raise OSError("the size of a removed file can not be seen")
    return sum(opened.values())


def kill_all(pid: int) -> None:
    """Kill all descendants of `pid`, their subreaper; they are stopped first, so that none escapes by forking."""
    while below := descendants(pid):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in below:
                with contextlib.suppress(OSError):
                    os.kill(one, number)
        reap()
        time.sleep(0.001)  # dying processes need the processor, too


def reap() -> dict[int, int]:
    """Wait status, by process id, of every child that has ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended
