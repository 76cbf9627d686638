"""Reading /proc: who descends from a process, and how much memory they hold."""

import contextlib
import os
import signal
import time
from pathlib import Path

PROC = Path("/proc")
READ_BYTES = 1 << 16  # a status file has 2 KiB; 64 KiB list some 8,000 children of one thread


def _read(path: str) -> bytes:
    """A file of /proc, at most READ_BYTES of it; plain calls, since this is done many times a second."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, READ_BYTES)
    finally:
        os.close(fd)


def _children(pid: int) -> list[int]:
    """Direct children, over all threads; empty if the process is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - called many times a second
            with contextlib.suppress(OSError):
                found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _children_by_scan(pid: int) -> list[int]:
    """The same on kernels without task/*/children: every process whose parent is `pid`."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                # The command's name may hold spaces and brackets: fields count from the last bracket.
                if int((PROC / name / "stat").read_bytes().rpartition(b")")[2].split()[1]) == pid:
                    found.append(int(name))
    return found


HAS_CHILDREN_FILE = Path("/proc/self/task").exists() and Path(f"/proc/self/task/{os.getpid()}/children").exists()


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before children."""
    children = _children if HAS_CHILDREN_FILE else _children_by_scan
    found: list[int] = []
    todo = [pid]
    while todo:
        more = children(todo.pop())
        found += more
        todo += more
    return found


def status_bytes(pid: int, *fields: bytes) -> int:
    """Sum of fields of /proc/PID/status such as b"VmRSS:", in bytes; 0 if the process is gone."""
    total = 0
    with contextlib.suppress(OSError):
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith(fields):
                total += int(line.split()[1]) * 1024
    return total


def private_bytes(pid: int) -> int:
    """Anonymous and shared-memory pages of a process in memory, in bytes; mapped files do not count; 0 if gone."""
    return status_bytes(pid, b"RssAnon:", b"RssShmem:")


def kill_all(pid: int) -> None:
    """Kill everything below `pid`, which must be the subreaper of it all. Stopped first, so that none escapes."""
    while below := descendants(pid):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in below:
                with contextlib.suppress(OSError):
                    os.kill(one, number)
        reap()
        time.sleep(0.001)  # the dying need the processor too


def reap() -> dict[int, int]:
    """Wait status of every child that has ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended
