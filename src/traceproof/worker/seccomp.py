"""The system calls that foreign code is refused, as a BPF program; needs no library.

Sources: linux/{filter,seccomp,audit}.h and the syscall tables of x86_64 and the generic one (aarch64).
"""

import ctypes
import struct
from errno import ENOSYS, EPERM

from traceproof.worker import kernel

AUDIT_ARCH = {kernel.X86_64: 0xC000003E, kernel.AARCH64: 0xC00000B7}
X32_BIT = 0x40000000  # x86_64's second table of the same calls: refused whole
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data
FILTER_FLAG_SPEC_ALLOW = 1 << 2  # without it, kernels before 5.16 slow all memory access of the process
SET_MODE_FILTER, PR_SET_SECCOMP, MODE_FILTER = 1, 22, 2

CLONE_THREAD = 0x00010000
CLONE_NEW = 0x7E020080  # every CLONE_NEW* flag of clone(2)
AF_UNIX = 1
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # typing into a terminal

Numbers = tuple[int | None, int | None]


def _calls(text: str) -> dict[str, Numbers]:
    """Of `name x86_64 aarch64, ...` the numbers by name; `-` where the processor has no such call."""
    calls = (call.split() for call in text.split(","))
    return {name: (int(first), None if second == "-" else int(second)) for name, first, second in calls}


REFUSED = {
    # other processes' memory, descriptors and registers
    **_calls(
        "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, "
        "kcmp 312 272, pidfd_getfd 438 438"
    ),
    # namespaces and mounts: the layers themselves
    **_calls(
        "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, "
        "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, "
        "fspick 433 433, mount_setattr 442 442, name_to_handle_at 303 264, open_by_handle_at 304 265"
    ),
    # parts of the kernel with a long history of holes and no use here; io_uring also opens sockets unseen
    **_calls(
        "bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, "
        "io_uring_enter 426 426, io_uring_register 427 427, add_key 248 217, request_key 249 218, "
        "keyctl 250 219, fanotify_init 300 262, lookup_dcookie 212 18, personality 135 92"
    ),
    # memory that belongs to no process, and so counts for none
    **_calls("shmget 29 194, memfd_secret 447 447"),
    # the machine
    **_calls(
        "kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, "
        "delete_module 176 106, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, "
        "quotactl 179 60, syslog 103 116, sethostname 170 161, setdomainname 171 162, "
        "settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, iopl 172 -, "
        "ioperm 173 -, modify_ldt 154 -"
    ),
}
CLONE, CLONE3, FORK, VFORK = (56, 220), (435, 435), (57, None), (58, None)
MEMFD_CREATE = (319, 279)
SOCKET, IOCTL, PRCTL = (41, 198), (16, 29), (157, 167)
KILL_CALL, TGKILL, TKILL = (62, 129), (234, 131), (200, 130)
SIGQUEUE, TGSIGQUEUE, PIDFD_SIGNAL = (129, 138), (297, 240), (424, 424)


class Program:
    """Builds the filter, one refusal after the other; what none refuses is allowed."""

    def __init__(self, machine: str) -> None:
        self._column = 0 if machine == kernel.X86_64 else 1
        self._code: list[tuple[int, int, int, int]] = [
            (LOAD, 0, 0, ARCH_AT),
            (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
            (RETURN, 0, 0, KILL),
            (LOAD, 0, 0, NUMBER_AT),
        ]
        if machine == kernel.X86_64:
            self._code += [(JUMP_GREATER_EQUAL, 0, 1, X32_BIT), (RETURN, 0, 0, ERRNO | ENOSYS)]

    def refuse(self, numbers: Numbers, error: int = EPERM) -> None:
        """Refuse a call whatever its arguments."""
        number = numbers[self._column]
        if number is not None:
            self._code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | error)]

    def refuse_argument(self, numbers: Numbers, argument: int, test: int, value: int, *, when: bool) -> None:
        """Refuse a call if `test` (JUMP_EQUAL, JUMP_SET) of the argument's low word with `value` is `when`."""
        number = numbers[self._column]
        if number is not None:
            self._code += [
                (JUMP_EQUAL, 0, 4, number),
                (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument),  # both processors are little-endian: the low word
                (test, 0, 1, value) if when else (test, 1, 0, value),
                (RETURN, 0, 0, ERRNO | EPERM),
                (LOAD, 0, 0, NUMBER_AT),
            ]

    def assemble(self) -> bytes:
        """The program as an array of struct sock_filter."""
        return b"".join(struct.pack("=HBBI", *line) for line in [*self._code, (RETURN, 0, 0, ALLOW)])


def program(machine: str, *, processes: bool, only_signal: int | None, gpu: bool = False) -> bytes:
    """The filter of a machine (x86_64 or aarch64).

    Threads may always be started, processes where it is said. `only_signal` is the one process that may be sent
    signals; None: any that can be seen. A GPU's driver makes files in memory, which others may not.
    """
    built = Program(machine)
    if not gpu:
        built.refuse(MEMFD_CREATE)
    for numbers in REFUSED.values():
        built.refuse(numbers)
    built.refuse(CLONE3, ENOSYS)  # its flags lie in memory, out of a filter's sight; libc falls back to clone
    built.refuse_argument(CLONE, 0, JUMP_SET, CLONE_NEW, when=True)
    if not processes:
        built.refuse_argument(CLONE, 0, JUMP_SET, CLONE_THREAD, when=False)
        built.refuse(FORK)
        built.refuse(VFORK)
    built.refuse_argument(SOCKET, 0, JUMP_EQUAL, AF_UNIX, when=False)
    built.refuse_argument(IOCTL, 1, JUMP_EQUAL, TIOCSTI, when=True)
    built.refuse_argument(IOCTL, 1, JUMP_EQUAL, TIOCLINUX, when=True)
    built.refuse_argument(PRCTL, 0, JUMP_EQUAL, kernel.PR_SET_PDEATHSIG, when=True)
    if only_signal is not None:
        for call in (KILL_CALL, TGKILL, SIGQUEUE, TGSIGQUEUE):
            built.refuse_argument(call, 0, JUMP_EQUAL, only_signal, when=False)
        built.refuse(TKILL)
        built.refuse(PIDFD_SIGNAL)
    return built.assemble()


def install(code: bytes) -> None:
    """Bind this process and its children to the filter, after no_new_privs. Raises OSError: the kernel refuses."""
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: a 16-bit count, padding, a pointer
    described = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    try:
        kernel.syscall("seccomp", SET_MODE_FILTER, FILTER_FLAG_SPEC_ALLOW, described)
    except OSError:  # kernels before 4.17 do not know the flag
        zero = ctypes.c_ulong(0)
        result = kernel.LIBC.prctl(
            ctypes.c_int(PR_SET_SECCOMP), ctypes.c_ulong(MODE_FILTER), described, zero, zero
        )
        kernel.checked(result, "seccomp")
