"""Setup functions for workers of the tests: each handler does what its item names."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Handler = Callable[[dict[str, Any]], Any]
MIB = 1 << 20
ENDED = 60.0  # seconds in which the worker that waits is ended on any machine
PREPARED: list[int] = []


def prepared() -> None:
    PREPARED.append(os.getpid())


def thread() -> None:
    threading.Thread(target=time.sleep, args=(ENDED,), daemon=True).start()


def fail(payload: str, scratch: Path) -> Handler:
    del scratch
    raise ValueError(payload)


def hang(payload: str, scratch: Path) -> Handler:
    del payload, scratch
    while True:
        time.sleep(1)


def setup(payload: Any, scratch: Path) -> Handler:  # noqa: ANN401 - any JSON value
    actions = Deeds(payload, scratch)

    def handler(item: dict[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
        arguments = dict(item)
        return getattr(actions, arguments.pop("do"))(**arguments)

    return handler


class Deeds:
    """What an item can ask for; `payload` is what the setup got."""

    def __init__(self, payload: Any, scratch: Path) -> None:  # noqa: ANN401 - any JSON value
        self.payload = payload
        self.scratch = scratch
        self.born = time.monotonic()
        self.kept: list[int] = []

    def echo(self, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        return value

    def id(self) -> float:
        return id(self) + self.born

    def was_prepared(self) -> bool:
        return len(PREPARED) == 1 and os.getpid() not in PREPARED

    def given(self) -> Any:  # noqa: ANN401 - any JSON value
        return self.payload

    def touch(self, files: list[int]) -> int:
        """Map the file that it is given and write to each of its pages."""
        with mmap.mmap(files[0], 0) as mapped:
            for at in range(0, len(mapped), 4096):
                mapped[at] = 1
            time.sleep(0.3)  # the guard looks several times
            return len(mapped)

    def resize(self, files: list[int], size: int) -> None:
        """Change the size of the file that it is given."""
        os.ftruncate(files[0], size)

    def share(self, count: int, files: list[int]) -> None:
        """Take memory that belongs to no file and is shared with children."""
        del files
        held = mmap.mmap(-1, count)
        for at in range(0, count, 4096):
            held[at] = 1
        time.sleep(ENDED)

    def fill(self, count: int) -> str:
        return "x" * count

    def no_json(self) -> Any:  # noqa: ANN401 - on purpose not JSON
        return object()

    def raise_error(self, text: str) -> None:
        raise ValueError(text)

    def recurse(self) -> None:
        self.recurse()

    def unreadable_error(self) -> None:
        class OddError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        raise OddError

    def loop(self) -> None:
        while True:
            pass

    def flood(self) -> None:
        while True:
            print("x" * 1000)  # noqa: T201 - what is tested

    def leave(self, code: int) -> None:
        os._exit(code)

    def exit_politely(self) -> None:
        raise SystemExit(3)

    def read_null(self) -> None:
        ctypes.string_at(0)

    def signal_self(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(ENDED)

    def allocate(self, count: int) -> int:
        return len(bytearray(count))

    def allocate_slowly(self) -> int:
        held = []
        while True:
            held.append(b"\1" * (8 * MIB))

    def fork(self, limit: int) -> int:
        """Start processes that stay, up to the test's own bound."""
        for count in range(limit):
            if os.fork() == 0:
                time.sleep(ENDED)
                os._exit(0)
            time.sleep(0.002 if count else 0)
        time.sleep(ENDED)
        return limit

    def fork_quietly(self) -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    def leave_behind(self, marker: str) -> None:
        """Start a process in a session of its own, with no parent and a name that can be found."""
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.execv("/bin/sleep", ["sleep", marker])  # noqa: S606 - what is tested
        os.wait()

    def kill_parent(self) -> str:
        parent = os.getppid()
        os.kill(parent or 1, signal.SIGKILL)
        time.sleep(ENDED)
        return "the signal was sent"

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def look_for(self, text: str) -> list[str]:
        """Where the text stands in any process's environment or command line."""
        found = []
        for entry in Path("/proc").iterdir():
            for file in ("environ", "cmdline"):
                try:
                    if entry.name.isdigit() and text.encode() in (entry / file).read_bytes():
                        found.append(str(entry / file))
                except OSError:
                    continue
        return found

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def read(self, path: str) -> str:
        return Path(path).read_text(encoding="utf-8")

    def entries(self, path: str) -> list[str]:
        return sorted(entry.name for entry in Path(path).iterdir())

    def write(self, path: str, text: str = "was here") -> None:
        Path(path).write_text(text, encoding="utf-8")

    def write_here(self, name: str, count: int) -> None:
        with (self.scratch / name).open("wb") as file:
            for _ in range(count // MIB):
                file.write(bytes(MIB))
            file.flush()
            time.sleep(ENDED)

    def connect(self, host: str, port: int) -> str:
        with socket.create_connection((host, port), timeout=ENDED):
            return "connected"

    def run_program(self) -> str:
        return subprocess.run(["/bin/echo", "out"], check=True, capture_output=True, text=True).stdout

    def mount(self) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        return 0 if libc.mount(b"tmpfs", os.fsencode(self.scratch), b"tmpfs", 0, None) == 0 else ctypes.get_errno()

    def new_user_namespace(self) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        return 0 if libc.unshare(0x10000000) == 0 else ctypes.get_errno()

    def system_call(self, number: int, arguments: list[int]) -> int:
        """0, or the error of a system call with numbers as arguments."""
        libc = ctypes.CDLL(None, use_errno=True)
        words = [ctypes.c_long(word) for word in (number, *arguments)]
        return 0 if libc.syscall(*words) >= 0 else ctypes.get_errno()

    def signal_by_a_file(self, pid: int) -> int:
        """Have the kernel signal a process about a file; returns the error."""
        try:
            fcntl.fcntl(0, fcntl.F_SETOWN, pid)
        except OSError as error:
            return int(error.errno or 0)
        return 0

    def change_mode(self, path: str) -> None:
        Path(path).chmod(0o777)

    def connect_to(self, name: str, *, pair: bool) -> None:
        """Connect to a Unix socket, also one of a pair; @ before its name stands for an abstract one."""
        ends = socket.socketpair(type=socket.SOCK_DGRAM) if pair else [socket.socket(socket.AF_UNIX)]
        with ends[0]:
            ends[0].connect(name.replace("@", "\0", 1))

    def start_threads(self, count: int) -> None:
        threading.stack_size(1 << 15)
        for _ in range(count):
            threading.Thread(target=time.sleep, args=(ENDED,), daemon=True).start()
        time.sleep(ENDED)

    def refill(self, files: list[int]) -> None:
        """Keep the memory of each call, and write into that of those before."""
        for number in self.kept:
            for at in range(0, os.fstat(number).st_size, MIB):
                os.pwrite(number, bytes(MIB), at)
        self.kept += files
        time.sleep(1 if len(self.kept) > 3 else 0)  # the guard looks

    def say(self, **answer: Any) -> None:  # noqa: ANN401 - any JSON value
        """Answer in the worker's place."""
        frame = sys._getframe()
        while frame.f_code.co_name != "answer_all":
            assert frame.f_back is not None
            frame = frame.f_back
        body = json.dumps({"id": frame.f_locals["request"]["id"], **answer}).encode()
        frame.f_locals["channel"].sendall(struct.pack("!Q", len(body)) + body)
        time.sleep(ENDED)

    def forge(self) -> None:
        """Write nonsense into every socket at hand, in place of the answer."""
        for entry in Path("/proc/self/fd").iterdir():
            try:
                if entry.is_socket():
                    os.write(int(entry.name), b"\0\0\0\0\0\0\0\5hello")
            except OSError:
                continue
        time.sleep(ENDED)

    def ask_torch(self, count: int) -> int:
        import torch

        return int(torch.ones(count, dtype=torch.uint8).sum(dtype=torch.int64))

    def torch_allocates(self, count: int) -> int:
        import torch

        return int(torch.empty(count, dtype=torch.uint8).fill_(1)[-1])
