"""Memory and files that a plain count of resident pages misses: each costs the worker that takes them, alone."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm, write
from pipeline import Run
from worker_misdeeds import ENDED
from worker_pools import Workers

from traceproof.run.untrusted import CaseResult, UntrustedSource
from traceproof.sandbox import MIB, Limits, Status

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
def socket_buffers() -> None:
    """2 GiB in the buffers of sockets that nobody reads."""
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
def workers() -> Iterator[Workers]:
    found = Workers("untrusted")
    with found.pool:
        if not found.has("files") or not found.has("system_calls"):
            pytest.skip("this machine isolates in part")
        yield found


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_bomb_ends_its_own_worker_in_a_typed_error(workers: Workers, name: str) -> None:
    limits = Limits(seconds=300, memory_bytes=256 * MIB)
    pool = workers.pool
    with (
        pool.session(setup="worker_misdeeds:setup", payload=None) as beside,
        pool.session(setup="test_bombs:setup", payload=name, limits=limits) as session,
    ):
        assert beside.ask({"do": "echo", "value": 1}).value == 1
        reply = session.ask({})
        assert reply.status in {Status.MEMORY, Status.ERROR}, reply.message
        assert reply.status is not Status.ERROR or "Error: [Errno" in reply.message
        assert beside.ask({"do": "echo", "value": 2}).value == 2


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
