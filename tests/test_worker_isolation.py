"""Hostile code against each layer of isolation. Where one is absent, the test says what then happens instead."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_pools import KINDS, NOTHING, SOURCES, TESTS, Workers, pool

import traceproof
from traceproof.sandbox import MIB, Limits, Status

SECRET = f"hf_{uuid.uuid4().hex}"


@pytest.fixture(scope="module", params=[*KINDS])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        made = Workers(request.param)
        with made.pool:
            made.pool.layers()
            yield made


def running(marker: str) -> list[int]:
    """Processes that have the marker in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_states_say_of_each_layer_whether_it_holds(workers: Workers) -> None:
    layers = workers.pool.layers()
    assert set(layers) == set(NOTHING)
    assert all(state == "holds" or state.startswith("absent: ") for state in layers.values())


def test_the_supervisors_secrets_are_not_in_the_environment(workers: Workers) -> None:
    seen, *_ = workers.run({"do": "environment"})
    assert SECRET not in str(seen.value)
    assert not {name for name in seen.value if "TOKEN" in name or "KEY" in name or "SECRET" in name}


def test_other_processes_secrets_are_out_of_reach(workers: Workers) -> None:
    with subprocess.Popen(["/bin/sleep", "60"], env={"TOKEN": SECRET}) as holder:
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
    wrote, there = workers.run(
        {"do": "write", "path": str(target)}, {"do": "write", "path": "in-scratch"}, limits=Limits(seconds=20)
    )
    assert there.status is Status.OK, there
    assert target.exists() is not workers.has("files", "landlock")
    assert (wrote.status is Status.ERROR) is workers.has("files", "landlock")


def test_a_server_on_this_machine_sees_no_connection(workers: Workers) -> None:
    seen: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)

        def accept() -> None:
            connection, address = server.accept()
            connection.close()
            seen.append(address)

        listener = threading.Thread(target=accept)
        listener.start()
        host, port = server.getsockname()
        (tried,) = workers.run({"do": "connect", "host": host, "port": port})
        shut = workers.has("network", "system_calls", "landlock")
        assert bool(seen) is not shut
        assert tried.status is (Status.ERROR if shut else Status.OK), tried
        if shut:  # let the listener go
            socket.create_connection((host, port)).close()
        listener.join()


def test_killing_the_parent_costs_one_item_at_most(workers: Workers) -> None:
    killed, after = workers.run({"do": "kill_parent"}, {"do": "echo", "value": 1})
    assert killed.status in {Status.ERROR, Status.CRASH}
    assert after.value == 1


def test_no_process_is_left_behind(workers: Workers) -> None:
    marker = str(uuid.uuid4().int % 10**9 + 10**9)  # seconds for sleep(1)
    left, after = workers.run({"do": "leave_behind", "marker": marker}, {"do": "echo", "value": 1})
    assert left.status is Status.OK, left
    assert after.value == 1
    assert running(marker) == []


def test_no_processes_allowed_means_none(workers: Workers) -> None:
    limits = Limits(seconds=20, processes=0)
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
        deadline = time.monotonic() + 10
        while running(marker) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert running(marker) == []


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
            limits=Limits(seconds=30, memory_bytes=64 * MIB),
        )
    assert (small.value, after.value) == (1000, 1000)
    assert large.status is Status.MEMORY, large
    assert filled.status is Status.MEMORY, filled
