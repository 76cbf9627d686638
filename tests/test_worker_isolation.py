"""Hostile code against each layer of isolation, and the layers' parts. Where one is absent, it is said."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from errno import ENOSYS, EPERM
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm, write
from pipeline import Run
from worker_misdeeds import ENDED
from worker_pools import KINDS, NOTHING, SOURCES, TESTS, Workers, pool

import traceproof
from traceproof.run.untrusted import CaseResult, UntrustedSource
from traceproof.sandbox import MIB, Limits, Status, kernel, model
from traceproof.sandbox.kernel import AARCH64, X86_64
from traceproof.sandbox.worker import folder_bytes

SECRET = f"hf_{uuid.uuid4().hex}"


@pytest.fixture(scope="module", params=[*KINDS])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        made = Workers(request.param)
        with made.pool:
            made.pool.layers()
            yield made


def running(marker: str) -> bool:
    """Whether a process has the marker in its command line."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if marker.encode() in file.read_bytes():
                return True
    return False


def ended(marker: str) -> bool:
    """Whether none has, after as long as signals take on a busy machine."""
    deadline = time.monotonic() + 60
    while (left := running(marker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def test_states_say_of_each_layer_whether_it_holds(workers: Workers) -> None:
    layers = workers.pool.layers()
    assert set(layers) == set(NOTHING)
    assert all(state == "holds" or state.startswith("absent: ") for state in layers.values())


def test_the_supervisors_secrets_are_not_in_the_environment(workers: Workers) -> None:
    seen, *_ = workers.run({"do": "environment"})
    assert SECRET not in str(seen.value)
    assert not {name for name in seen.value if "TOKEN" in name or "KEY" in name or "SECRET" in name}


def test_other_processes_secrets_are_out_of_reach(workers: Workers) -> None:
    with subprocess.Popen(["/bin/sleep", "infinity"], env={"TOKEN": SECRET}) as holder:
        (looked,) = workers.run({"do": "look_for", "text": SECRET})
        holder.kill()
    hidden = workers.has("process", "user", "landlock")
    assert bool(looked.value) is not hidden, looked


def test_a_file_at_home_can_not_be_read(workers: Workers, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET, encoding="utf-8")
    (read,) = workers.run({"do": "read", "path": str(secret)})
    if workers.has("files", "landlock"):
        assert read.status is Status.ERROR
        assert "FileNotFoundError" in read.message or "PermissionError" in read.message
    else:
        assert read.value == SECRET


def test_the_home_folder_shows_nothing_of_its_own(workers: Workers) -> None:
    home = Path.home()
    own = {entry.name for entry in home.iterdir()}
    needed = {part for path in (sys.prefix, sys.base_prefix, str(SOURCES)) for part in Path(path).parts}
    (listed,) = workers.run({"do": "entries", "path": str(home)})
    if workers.has("files", "landlock"):
        assert listed.status is Status.ERROR or set(listed.value) <= needed
    else:
        assert set(listed.value) >= own


@pytest.mark.parametrize("place", ["tmp", "sources", "interpreter"])
def test_nothing_is_written_outside_scratch(workers: Workers, place: str, tmp_path: Path) -> None:
    folder = {"tmp": tmp_path, "sources": Path(traceproof.__file__).parent, "interpreter": Path(sys.prefix)}[place]
    if not workers.has("files", "landlock") and place != "tmp":
        pytest.skip("no layer guards files: this would write into the installation")
    target = folder / f"written-{uuid.uuid4().hex}"
    wrote, there = workers.run({"do": "write", "path": str(target)}, {"do": "write", "path": "in-scratch"})
    assert there.status is Status.OK, there
    assert target.exists() is not workers.has("files", "landlock")
    assert (wrote.status is Status.ERROR) is workers.has("files", "landlock")


def test_a_server_on_this_machine_sees_no_connection(workers: Workers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # where the kernel keeps what connects
        host, port = server.getsockname()
        (tried,) = workers.run({"do": "connect", "host": host, "port": port})
        shut = workers.has("network", "system_calls", "landlock")
        assert tried.status is (Status.ERROR if shut else Status.OK), tried
        server.settimeout(0)
        with pytest.raises(BlockingIOError) if shut else nullcontext():
            server.accept()[0].close()


def test_killing_the_parent_costs_one_item_at_most(workers: Workers) -> None:
    killed, after = workers.run({"do": "kill_parent"}, {"do": "echo", "value": 1})
    assert killed.status in {Status.ERROR, Status.CRASH}
    assert after.value == 1


def test_no_process_is_left_behind(workers: Workers) -> None:
    marker = str(uuid.uuid4().int % 10**9 + 10**9)  # seconds for sleep(1)
    left, after = workers.run({"do": "leave_behind", "marker": marker}, {"do": "echo", "value": 1})
    assert left.status is Status.OK, left
    assert after.value == 1
    assert ended(marker)


def test_other_processes_can_not_be_changed(workers: Workers) -> None:
    if not workers.has("system_calls"):
        pytest.skip("no filter of system calls")
    column = MACHINES.index(kernel.MACHINE)
    limits, policy = (kernel.ON_PROCESSES[name][column] for name in ("prlimit64", "sched_setscheduler"))
    with subprocess.Popen(["/bin/sleep", "infinity"]) as other:
        pid = 1 if workers.has("process") else other.pid  # its guard, or whatever else runs here
        calls = {"limits": [limits, pid, 7, 0, 0], "priority": [policy, pid, 5, 0]}
        (itself, *tried) = workers.run(
            {"do": "system_call", "number": limits, "arguments": [0, 7, 0, 0]},
            *({"do": "system_call", "number": number, "arguments": rest} for number, *rest in calls.values()),
            {"do": "signal_by_a_file", "pid": pid},
        )
        other.kill()
    assert itself.value == 0
    assert [one.value for one in tried] == [EPERM] * 3


def test_memory_of_other_processes_and_of_none_is_out_of_reach(workers: Workers) -> None:
    if not workers.has("system_calls"):
        pytest.skip("no filter of system calls")
    shared = {name: kernel.REFUSED[name] for name in ("shmget", "shmat", "msgget", "msgrcv", "semget", "mq_open")}
    numbers = [one[MACHINES.index(kernel.MACHINE)] for one in (kernel.UNSEEN | shared).values()]
    tried = workers.run(*({"do": "system_call", "number": one, "arguments": [0, 0, 0, 0]} for one in numbers))
    assert {one.value for one in tried} == {EPERM}


def test_the_modes_of_this_user_s_files_stay(workers: Workers, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    (changed,) = workers.run({"do": "change_mode", "path": str(secret)})
    guarded = workers.has("files", "landlock")
    assert (changed.status is Status.ERROR) is guarded
    assert (secret.stat().st_mode & 0o777 == 0o600) is guarded


@pytest.mark.parametrize("kind", ["with a path", "abstract", "of a pair"])
def test_a_socket_of_this_machine_is_out_of_reach(workers: Workers, kind: str, tmp_path: Path) -> None:
    name, pair = f"@{uuid.uuid4().hex}" if kind == "abstract" else str(tmp_path / "socket"), kind == "of a pair"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if pair else socket.SOCK_STREAM) as server:
        server.bind(name.replace("@", "\0", 1))
        if not pair:
            server.listen()
        (tried,) = workers.run({"do": "connect_to", "name": name, "pair": pair})
    assert (tried.status is Status.ERROR) is workers.has("files", "system_calls"), tried


def test_what_is_concealed_within_readable_folders_can_not_be_read(workers: Workers, tmp_path: Path) -> None:
    shown, hidden = tmp_path / "shown" / "file", tmp_path / "hidden"
    shown.parent.mkdir()
    shown.write_text("seen", encoding="utf-8")
    (hidden / "inner").mkdir(parents=True)
    (hidden / "inner" / "file").write_text(SECRET, encoding="utf-8")
    (tmp_path / "link").symlink_to(hidden)
    left_out = [layer for layer in NOTHING if not workers.has(layer)]
    with (
        replace(workers.pool, without=left_out, readable=[tmp_path], conceal=[hidden]) as one,
        one.session(setup="worker_misdeeds:setup", payload=None) as session,
    ):
        paths = (shown, hidden / "inner" / "file", tmp_path / "link" / "inner" / "file")
        found = [session.ask({"do": "read", "path": str(path)}).value for path in paths]
        assert {"shown", "link"} <= {*session.ask({"do": "entries", "path": str(tmp_path)}).value}
    kept = None if workers.has("files", "landlock") else SECRET
    assert found == ["seen", kept, kept]


def test_more_threads_than_processes_of_its_kind_have_end_it(workers: Workers) -> None:
    (started,) = workers.run({"do": "start_threads", "count": 5000})
    assert started.status in {Status.PROCESSES, Status.ERROR}, started  # the second: of the kernel's own limit


def test_the_guard_s_settings_stay_where_no_landlock_keeps_them() -> None:
    with pool(without=("landlock",)) as weaker:
        layers, path = weaker.layers(), "/proc/1/oom_score_adj"
        with weaker.session(setup="worker_misdeeds:setup", payload=None) as session:
            (wrote,) = [session.ask({"do": "write", "path": path, "text": "1000"})]
    assert layers["process"] != "holds" or wrote.status is Status.ERROR


def test_no_processes_allowed_means_none(workers: Workers) -> None:
    limits = Limits(processes=0)
    forked, ran = workers.run({"do": "fork_quietly"}, {"do": "run_program"}, limits=limits)
    assert (forked.status is Status.ERROR) is workers.has("system_calls")
    assert (ran.status is Status.ERROR) is workers.has("system_calls")


def test_a_program_may_run_where_processes_are_allowed(workers: Workers) -> None:
    (ran,) = workers.run({"do": "run_program"})
    assert ran.value == "out\n", ran


def test_the_layers_can_not_be_taken_away(workers: Workers) -> None:
    if not workers.has("system_calls", "privileges"):
        pytest.skip("no layer guards privileges: as root this would mount")
    mounted, entered = workers.run({"do": "mount"}, {"do": "new_user_namespace"})
    assert mounted.value == errno.EPERM, mounted
    assert bool(entered.value) is workers.has("system_calls"), entered


def test_a_killed_supervisor_leaves_nothing(workers: Workers, tmp_path: Path) -> None:
    marker = str(uuid.uuid4().int % 10**9 + 10**9)
    layers = workers.pool.layers()
    without = [layer for layer, state in layers.items() if state != "holds"]
    program = (
        "from worker_pools import pool\n"
        f"with pool(without={without!r}).session(setup='worker_misdeeds:setup', payload=None) as session:\n"
        f"    print(session.ask({{'do': 'leave_behind', 'marker': '{marker}'}}).status, flush=True)\n"
        "    session.ask({'do': 'loop'})\n"
    )
    path = os.pathsep.join([str(SOURCES), str(TESTS)])
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": path, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ok\n"
        assert running(marker)
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
        assert ended(marker)


@pytest.mark.parametrize(
    "left_out", [("files",), ("process",), ("network", "ipc"), ("user",), ("landlock",)], ids=str
)
def test_any_one_layer_may_be_missing(left_out: tuple[str, ...]) -> None:
    with pool(without=left_out) as weaker:
        items = [{"do": "echo", "value": 1}, {"do": "leave", "code": 3}, {"do": "echo", "value": 2}]
        with weaker.session(setup="worker_misdeeds:setup", payload=None) as session:
            assert [session.ask(item).value for item in items] == [1, None, 2]
        assert all(weaker.layers()[layer] == "absent: left out on request" for layer in left_out)


def test_tensors_work_inside_and_too_large_ones_are_refused() -> None:
    made = Workers("untrusted", preload=("torch",))
    with made.pool:
        small, large, filled, after = made.run(
            {"do": "ask_torch", "count": 1000},
            {"do": "torch_allocates", "count": 100 << 30},
            {"do": "torch_allocates", "count": 256 * MIB},
            {"do": "ask_torch", "count": 1000},
            limits=Limits(memory_bytes=64 * MIB),
        )
    assert (small.value, after.value) == (1000, 1000)
    assert large.status is Status.MEMORY, large
    assert filled.status is Status.MEMORY, filled


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
    column, listed = MACHINES.index(machine), kernel.REFUSED | ({} if gpu else kernel.UNSEEN)
    refused = {numbers[column] for numbers in listed.values()}
    absent = {of(machine, numbers) for numbers in (kernel.CLONE3, kernel.OPENAT2)}
    absent |= set() if gpu else {of(machine, kernel.SENDFILE)}
    special = {*absent, of(machine, kernel.SOCKET), of(machine, kernel.SOCKETPAIR)}
    for number in range(500):
        if number not in special:
            assert verdict(code, machine, number) == (EPERM if number in refused else ALLOWED), number
    assert {verdict(code, machine, number) for number in absent} == {ENOSYS}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "argument", "value", "expected"),
    [
        (kernel.SOCKET, 0, kernel.AF_UNIX, ALLOWED),
        (kernel.SOCKET, 0, 2, EPERM),  # AF_INET
        (kernel.SOCKET, 0, 10, EPERM),  # AF_INET6
        (kernel.SOCKET, 0, 16, EPERM),  # AF_NETLINK
        (kernel.SOCKETPAIR, 0, 30, EPERM),  # AF_TIPC
        (kernel.OPENAT, 2, os.O_RDONLY | os.O_CLOEXEC, ALLOWED),
        (kernel.OPENAT, 2, os.O_WRONLY | os.O_TRUNC, ALLOWED),
        (kernel.OPENAT, 2, os.O_RDONLY | os.O_TRUNC, EPERM),
        (kernel.IOCTL, 1, kernel.FS_IOC_SETFLAGS, EPERM),
        (kernel.CLONE, 0, 17, ALLOWED),  # fork: SIGCHLD
        (kernel.CLONE, 0, 0x10000000 | 17, EPERM),  # CLONE_NEWUSER
        (kernel.CLONE, 0, 0x3D0F00, ALLOWED),  # pthread_create's flags
        (kernel.CLONE, 0, 0x3D0F00 & ~kernel.CLONE_FILES, EPERM),
        (kernel.IOCTL, 1, 0x5401, ALLOWED),  # TCGETS: is it a terminal
        (kernel.IOCTL, 1, kernel.TIOCSTI, EPERM),
        (kernel.PRCTL, 0, 15, ALLOWED),  # PR_SET_NAME
        (kernel.PRCTL, 0, 1, EPERM),  # PR_SET_PDEATHSIG
        (kernel.PRCTL, 0, kernel.PR_SET_DUMPABLE, EPERM),
        (kernel.FCNTL, 1, kernel.F_SETOWN, EPERM),
        (kernel.SETPRIORITY, 1, 0, ALLOWED),
        (kernel.SETPRIORITY, 1, 1, EPERM),  # the guard
        (kernel.SETPRIORITY, 0, 2, EPERM),  # all processes of this user
        (kernel.ON_PROCESSES["sched_setaffinity"], 0, 5, ALLOWED),  # a thread, as OpenMP places them
        (kernel.ON_PROCESSES["sched_setaffinity"], 0, 1, EPERM),
        (kernel.CLOSE_RANGE, 2, 4, ALLOWED),  # close on exec
        (kernel.CLOSE_RANGE, 2, 2, EPERM),  # a table of open files of this thread's own
        (kernel.MMAP, 3, 0x22, ALLOWED),  # private
        (kernel.MMAP, 3, 0x01, ALLOWED),  # of a file
        (kernel.MMAP, 3, 0x4021, EPERM),
        (kernel.SETSOCKOPT, 2, 8, ALLOWED),  # SO_RCVBUF
        (kernel.SETSOCKOPT, 2, kernel.SO_SNDBUF, EPERM),
    ],
)
def test_the_arguments(machine: str, call: kernel.Numbers, argument: int, value: int, expected: str | int) -> None:
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
    for numbers in kernel.ON_PROCESSES.values():
        assert verdict(code, machine, of(machine, numbers), {0: 0}) == ALLOWED
        assert verdict(code, machine, of(machine, numbers), {0: 78}) == EPERM


def test_the_other_tables_of_system_calls_are_closed() -> None:
    code = kernel.filter_program(X86_64, processes=True, only_signal=None)
    assert verdict(code, X86_64, kernel.X32_BIT | 41) == ENOSYS
    assert verdict(code, AARCH64, 41) == KILLED  # stands for any foreign architecture, 32-bit x86 among them


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


def test_a_process_s_memory_is_told_in_bytes_and_of_one_that_is_gone_none() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        one.stdin.write(b"\n")
        one.stdin.flush()
        one.stdout.readline()  # it has begun
        pages = int(Path(f"/proc/{one.pid}/statm").read_text().split()[0])
        size = pages * os.sysconf("SC_PAGE_SIZE")
        assert kernel.status_bytes(one.pid, b"VmSize:") == size
        assert kernel.status_bytes(one.pid, b"VmSize:", b"VmPeak:") >= 2 * size
        one.kill()
    assert kernel.status_bytes(one.pid, b"VmSize:") == 0


PAGE = 4096
BOMBS: dict[str, Callable[[], object]] = {}


def bomb(function: Callable[[], object]) -> Callable[[], object]:
    BOMBS[function.__name__] = function
    return function


def let_go(held: mmap.mmap) -> None:
    """Write to shared memory and drop it from this process's page tables: it is there, and resident for nobody."""
    for start in range(0, len(held), 16 * MIB):
        for at in range(start, start + 16 * MIB, PAGE):
            held[at] = 1
        held.madvise(mmap.MADV_DONTNEED, start, 16 * MIB)


@bomb
def shared_memory() -> None:
    let_go(mmap.mmap(-1, 3 << 30))


@bomb
def shared_zeros() -> None:
    with Path("/dev/zero").open("r+b", buffering=0) as zeros:
        let_go(mmap.mmap(zeros.fileno(), 3 << 30))


@bomb
def page_tables() -> None:
    """A page table of 4 KiB for every 2 MiB that are read: 512 MiB of them, and not a page with content."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    held = mmap.mmap(-1, 1 << 38, flags=private, prot=mmap.PROT_READ)
    held.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(held), 2 * MIB):
        _ = held[at]
    time.sleep(ENDED)


@bomb
def files_in_memory() -> None:
    for number in range(800_000):
        Path(f"/dev/shm/{number}").touch()  # noqa: S108 - its own


@bomb
def main_threads_that_ended() -> None:
    """Memory of processes whose main threads, of which status and files are those of a process, have ended."""

    def take() -> None:
        held = [b"1" * (16 * MIB) for _ in range(10)]
        time.sleep(5)
        os._exit(len(held))

    for _ in range(3):
        if os.fork() == 0:
            threading.Thread(target=take).start()
            ctypes.CDLL(None).syscall(60 if kernel.MACHINE == X86_64 else 93, 0)  # ends this thread alone
    while True:
        os.wait()


@bomb
def socket_buffers() -> None:
    """2 GiB in the buffers of sockets that nobody reads, in processes that nobody may look into."""
    ctypes.CDLL(None).prctl(kernel.PR_SET_DUMPABLE, 0, 0, 0, 0)
    for _ in range(8):
        if os.fork() == 0:
            with ExitStack() as held, suppress(OSError):
                for _ in range(480):
                    for end in map(held.enter_context, socket.socketpair()):
                        end.settimeout(0)
                        with suppress(PermissionError):
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
                        with suppress(BlockingIOError):
                            while True:
                                end.send(bytes(PAGE * 8))
                time.sleep(ENDED)
            os._exit(0)
    time.sleep(ENDED)


def setup(payload: str, scratch: Path) -> Callable[[Any], object]:
    """For a worker: its items run what the payload names."""
    del scratch
    return lambda _: BOMBS[payload]()


@pytest.fixture(scope="module")
def whole() -> Iterator[Workers]:
    found = Workers("untrusted")
    with found.pool:
        if not found.has("files") or not found.has("system_calls"):
            pytest.skip("this machine isolates in part")
        yield found


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_bomb_ends_its_own_worker_in_a_typed_error(whole: Workers, name: str) -> None:
    limits = Limits(seconds=300, memory_bytes=256 * MIB)
    pool = whole.pool
    with (
        pool.session(setup="worker_misdeeds:setup", payload=None) as beside,
        pool.session(setup="test_worker_isolation:setup", payload=name, limits=limits) as session,
    ):
        assert beside.ask({"do": "echo", "value": 1}).value == 1
        reply = session.ask({})
        assert reply.status in {Status.MEMORY, Status.ERROR}, reply.message
        assert reply.status is not Status.ERROR or "Error: [Errno" in reply.message
        assert beside.ask({"do": "echo", "value": 2}).value == 2


def removed(count: int) -> list[int]:
    """Open files of 16 MiB that have no name any more; their names had two lines for `bytes.splitlines`."""
    held = []
    for number in range(count):
        held.append(os.open(f"{number}\rx", os.O_RDWR | os.O_CREAT))
        Path(f"{number}\rx").unlink()
        os.write(held[-1], bytes(16 * MIB))
    return held


def removed_and_mapped(count: int) -> None:
    libc = ctypes.CDLL(None)
    for _ in range(count):
        (file,) = removed(1)
        libc.mmap(None, ctypes.c_size_t(PAGE), 1, 1, file, ctypes.c_long(0))
        os.close(file)


def of_a_thread(count: int) -> list[int]:
    """Removed files in a table that is this thread's alone."""
    ctypes.CDLL(None).syscall(kernel.CLOSE_RANGE[0], 1000, 1000, 2)
    return removed(count)


def in_a_thread(count: int) -> None:
    threading.Thread(target=lambda: time.sleep(ENDED if of_a_thread(count) else 0)).start()


def deep(count: int) -> None:
    """Files behind a path that is longer than a path may be."""
    for _ in range(20):
        Path("x" * 250).mkdir()
        os.chdir("x" * 250)
    for number in range(count):
        Path(str(number)).write_bytes(bytes(16 * MIB))


def nested(count: int) -> None:
    """Files in more folders, one inside of the other, than Python calls functions."""
    for _ in range(1500):
        Path("x").mkdir()
        os.chdir("x")
    for number in range(count):
        Path(str(number)).write_bytes(bytes(16 * MIB))


HIDDEN: dict[str, Callable[[int], object]] = {
    one.__name__: one for one in (removed, removed_and_mapped, in_a_thread, deep, nested)
}


def hidden(payload: str, scratch: Path) -> Callable[[Any], object]:
    """For a worker: its items leave files where a walk of the folder does not find them."""
    del scratch

    def handler(_: object) -> None:
        kept = HIDDEN[payload](8)
        time.sleep(ENDED)
        del kept

    return handler


@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_files_that_are_hidden_from_a_walk_count(name: str) -> None:
    limits = Limits(seconds=30, file_bytes=32 * MIB)
    workers = Workers("untrusted")
    setup = "test_worker_isolation:hidden"
    with workers.pool, workers.pool.session(setup=setup, payload=name, limits=limits) as session:
        assert session.ask({}).status is Status.OUTPUT


def test_a_definition_of_nothing_but_timeouts_costs_at_most_three_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "import torch\n\n\ndef run(hidden_states, weight):\n    while True:\n        pass\n"
    write(tmp_path / "dataset", rmsnorm("endless", endless))
    called, call = [], UntrustedSource.run

    def counted(self: UntrustedSource, *arguments: Any, **options: Any) -> CaseResult:  # noqa: ANN401 - as it is
        called.append(arguments)
        return call(self, *arguments, **options)

    monkeypatch.setattr(UntrustedSource, "run", counted)
    limits = Limits(seconds=1.0, memory_bytes=2 << 30)
    rows = Run(tmp_path / "dataset", tmp_path / "results", limits=limits).verify()["endless"]
    assert {row["reason"] for row in rows} == {"timeout"}
    assert 0 < len(called) <= 3 < len(rows)


def test_mounts_with_names_beyond_ascii_are_restricted_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "mountinfo"
    lines = (
        f"22 1 0:21 / {point} rw,nosuid,relatime - ext4 /dev/x rw\n"
        for point in ("/a\\040b/é", "/a\\040b/é/\x85c", "/d")
    )
    told.write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(kernel, "MOUNTS", told)
    monkeypatch.setattr(kernel, "syscall", unsupported)
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(kernel, "mount", lambda _source, point, _type, flags: seen.append((point, flags)))
    kernel.restrict_mounts("/a b/é", kernel.MS_RDONLY)
    flags = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_RELATIME
    assert seen == [("/a b/é", flags), ("/a b/é/\x85c", flags)]


def unsupported(*_: object) -> None:
    """A system call that a kernel before 5.12 does not have."""
    raise OSError(ENOSYS, "no such call")
