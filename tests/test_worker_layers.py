"""Parts of the isolation: the system call filter, the file view, messages, the watch over folders."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from errno import ENOSYS, EPERM
from pathlib import Path

import pytest

from traceproof.sandbox import isolation, kernel, model
from traceproof.sandbox.kernel import AARCH64, X86_64
from traceproof.sandbox.worker import folder_bytes

ALLOWED, KILLED = "allowed", "killed"
MACHINES = (X86_64, AARCH64)


def verdict(code: bytes, machine: str, number: int, arguments: Mapping[int, int] | None = None) -> str | int:
    """What a filter program says to a call, by running it as the kernel would: allowed, killed, or an errno."""
    words = [(arguments or {}).get(index, 0) for index in range(6)]
    data = struct.pack("<IIQ6Q", number, kernel.AUDIT_ARCH[machine], 0, *words)
    lines = list(struct.iter_unpack("=HBBI", code))
    at = accumulator = 0
    while True:
        kind, if_true, if_false, value = lines[at]
        at += 1
        match kind:
            case kernel.LOAD:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case kernel.AND:
                accumulator &= value
            case kernel.JUMP_EQUAL:
                at += if_true if accumulator == value else if_false
            case kernel.JUMP_GREATER_EQUAL:
                at += if_true if accumulator >= value else if_false
            case kernel.JUMP_SET:
                at += if_true if accumulator & value else if_false
            case kernel.RETURN if value == kernel.ALLOW:
                return ALLOWED
            case kernel.RETURN if value == kernel.KILL:
                return KILLED
            case kernel.RETURN:
                return int(value & 0xFFFF)
            case _:
                raise AssertionError(f"instruction {kind}")


def of(machine: str, numbers: kernel.Numbers) -> int:
    number = numbers[MACHINES.index(machine)]
    assert number is not None
    return number


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_what_it_lists_and_nothing_else(machine: str, gpu: bool) -> None:  # noqa: FBT001 - a parameter
    code = kernel.filter_program(machine, processes=True, only_signal=None, gpu=gpu)
    refused = {number for numbers in kernel.REFUSED.values() if (number := numbers[MACHINES.index(machine)])}
    refused |= set() if gpu else {of(machine, kernel.MEMFD_CREATE)}
    special = {of(machine, kernel.CLONE3), of(machine, kernel.SOCKET)}
    for number in range(500):
        if number not in special:
            assert verdict(code, machine, number) == (EPERM if number in refused else ALLOWED), number
    assert verdict(code, machine, of(machine, kernel.CLONE3)) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "argument", "value", "expected"),
    [
        (kernel.SOCKET, 0, kernel.AF_UNIX, ALLOWED),
        (kernel.SOCKET, 0, 2, EPERM),  # AF_INET
        (kernel.SOCKET, 0, 10, EPERM),  # AF_INET6
        (kernel.SOCKET, 0, 16, EPERM),  # AF_NETLINK
        (kernel.CLONE, 0, 17, ALLOWED),  # fork: SIGCHLD
        (kernel.CLONE, 0, 0x10000000 | 17, EPERM),  # CLONE_NEWUSER
        (kernel.IOCTL, 1, 0x5401, ALLOWED),  # TCGETS: is it a terminal
        (kernel.IOCTL, 1, kernel.TIOCSTI, EPERM),
        (kernel.PRCTL, 0, 15, ALLOWED),  # PR_SET_NAME
        (kernel.PRCTL, 0, 1, EPERM),  # PR_SET_PDEATHSIG
        (kernel.MMAP, 3, 0x22, ALLOWED),  # private
        (kernel.MMAP, 3, 0x01, ALLOWED),  # of a file
        (kernel.MMAP, 3, 0x4021, EPERM),
        (kernel.SETSOCKOPT, 2, 8, ALLOWED),  # SO_RCVBUF
        (kernel.SETSOCKOPT, 2, kernel.SO_SNDBUF, EPERM),
    ],
)
def test_the_filter_looks_at_arguments(
    machine: str, call: kernel.Numbers, argument: int, value: int, expected: str | int
) -> None:
    code = kernel.filter_program(machine, processes=True, only_signal=None)
    assert verdict(code, machine, of(machine, call), {argument: value}) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_without_processes_threads_still_start(machine: str) -> None:
    code = kernel.filter_program(machine, processes=False, only_signal=None)
    assert verdict(code, machine, of(machine, kernel.CLONE), {0: 17}) == EPERM
    assert verdict(code, machine, of(machine, kernel.CLONE), {0: 0x3D0F00}) == ALLOWED  # pthread_create's flags


@pytest.mark.parametrize("machine", MACHINES)
def test_without_a_process_namespace_one_may_signal_oneself_only(machine: str) -> None:
    code = kernel.filter_program(machine, processes=True, only_signal=77)
    for call in (kernel.KILL_CALL, kernel.TGKILL):
        assert verdict(code, machine, of(machine, call), {0: 77}) == ALLOWED
        assert verdict(code, machine, of(machine, call), {0: 78}) == EPERM
        assert verdict(code, machine, of(machine, call), {0: 0xFFFFFFFF}) == EPERM  # kill(-1): everyone


def test_the_other_tables_of_system_calls_are_closed() -> None:
    code = kernel.filter_program(X86_64, processes=True, only_signal=None)
    assert verdict(code, X86_64, kernel.X32_BIT | 41) == ENOSYS
    assert verdict(code, AARCH64, 41) == KILLED  # stands for any foreign architecture, 32-bit x86 among them


def test_the_view_holds_no_home_and_no_tmp(tmp_path: Path) -> None:
    seen = isolation.view_of_this_process(str(tmp_path), gpu=False)
    assert str(Path.home()) not in seen.readable
    assert "/tmp" not in seen.readable  # noqa: S108 - that it is not shown is the point
    assert "/etc" not in seen.readable
    assert "/dev/null" in seen.devices


@pytest.mark.parametrize(
    ("data", "limit", "error"),
    [
        (model.LENGTH.pack(1 << 62), 100, model.TooLargeError),
        (model.encode("ab") + b"c", 100, model.BrokenMessageError),
    ],
)
def test_a_message_that_breaks_the_rules_is_refused(data: bytes, limit: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        model.is_whole(data, limit)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(model.BrokenMessageError):
        model.decode(body)


def test_a_message_arrives_in_any_pieces() -> None:
    data = model.encode({"a": [1, "ü"]})
    assert not any(model.is_whole(data[:end], 100) for end in range(len(data)))
    assert model.is_whole(data, 100)
    assert model.decode(data[model.LENGTH.size :]) == {"a": [1, "ü"]}


def test_a_folder_weighs_what_its_files_take(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert 100_000 <= folder_bytes(tmp_path) < 300_000
    assert folder_bytes(tmp_path / "nowhere") == 0
