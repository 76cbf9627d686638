"""A worker's ordinary life: answers, failures, limits, replacement; of untrusted code and of ground truths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest
from definitions import rmsnorm
from worker_misdeeds import ENDED
from worker_pools import Workers, pool

from traceproof.errors import TraceproofError
from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import MIB, Limits, Pool, Reply, Status
from traceproof.sandbox.isolation import HOLDS
from traceproof.sandbox.model import Shared


@pytest.fixture(scope="module", params=["untrusted", "limits_only"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(request.param)
    with made.pool:
        yield made


def statuses(replies: list[Reply]) -> list[Status]:
    return [reply.status for reply in replies]


def test_items_run_in_order_in_one_worker_that_knows_its_payload(workers: Workers) -> None:
    replies = workers.run({"do": "given"}, {"do": "echo", "value": [1.5, None, "ä"]}, payload={"a": [1]})
    assert [reply.value for reply in replies] == [{"a": [1]}, [1.5, None, "ä"]]
    assert statuses(replies) == [Status.OK, Status.OK]


def test_an_item_may_have_a_time_of_its_own(workers: Workers) -> None:
    limits = Limits(seconds=0.5)
    setup = "worker_misdeeds:setup"
    with workers.pool.session(setup=setup, payload=None, limits=limits) as session:
        assert session.ask({"do": "nap", "seconds": 1.0}, 20.0).status is Status.OK
        assert session.ask({"do": "nap", "seconds": 1.0}).status is Status.TIMEOUT


def test_a_session_that_is_interrupted_from_another_thread_starts_no_further_worker(workers: Workers) -> None:
    with workers.pool.session(setup="worker_misdeeds:setup", payload=None) as session:
        session.ask({"do": "echo", "value": 1})
        with ThreadPoolExecutor(1) as executor:
            asked = executor.submit(session.ask, {"do": "nap", "seconds": 30.0})
            session.interrupt()
            assert asked.result().status is Status.CRASH
        again = session.ask({"do": "echo", "value": 2})
        assert (again.status, again.message) == (Status.CRASH, "interrupted: nobody waits for it")


@pytest.mark.parametrize(
    ("deed", "status", "said"),
    [
        ({"do": "raise_error", "text": "boo"}, Status.ERROR, "ValueError: boo"),
        ({"do": "unreadable_error"}, Status.ERROR, "OddError"),
        ({"do": "recurse"}, Status.ERROR, "RecursionError"),
        ({"do": "exit_politely"}, Status.ERROR, "SystemExit: 3"),
        ({"do": "no_json"}, Status.ERROR, "not JSON"),
        ({"do": "leave", "code": 7}, Status.CRASH, "exited with code 7"),
        ({"do": "read_null"}, Status.CRASH, "SIGSEGV"),
        ({"do": "signal_self", "number": signal.SIGKILL}, Status.CRASH, "SIGKILL"),
        ({"do": "signal_self", "number": signal.SIGABRT}, Status.CRASH, "SIGABRT"),
        ({"do": "flood"}, Status.OUTPUT, "printed more than"),
        ({"do": "fill", "count": 5 * MIB}, Status.OUTPUT, "the limit is"),
        ({"do": "forge"}, Status.CRASH, "can not be read"),
        ({"do": "say", "status": "isolation"}, Status.CRASH, "can not be read"),
        ({"do": "say", "status": "refused"}, Status.CRASH, "can not be read"),
    ],
    ids=lambda value: value.get("do") if isinstance(value, dict) else "",
)
def test_a_failure_costs_its_own_item(
    workers: Workers, deed: dict[str, object], status: Status, said: str
) -> None:
    limits = Limits(message_bytes=4 * MIB)
    first, failed, last = workers.run({"do": "echo", "value": 1}, deed, {"do": "echo", "value": 2}, limits=limits)
    assert (first.value, last.value) == (1, 2)
    assert failed.status is status, failed
    assert said in failed.message
    assert failed.value is None


@pytest.mark.parametrize(
    ("limits", "deed", "statuses", "said"),
    [
        ({"seconds": 1}, {"do": "loop"}, {Status.TIMEOUT}, "1 s"),
        ({"memory_bytes": 128 * MIB}, {"do": "allocate_slowly"}, {Status.MEMORY}, ""),
        ({}, {"do": "allocate", "count": 100 << 40}, {Status.MEMORY}, ""),  # as much as no machine has
        ({"processes": 8}, {"do": "fork", "limit": 200}, {Status.PROCESSES}, "8 processes"),
        # EFBIG from the kernel, or the guard's look
        (
            {"file_bytes": 4 * MIB},
            {"do": "write_here", "name": "large", "count": 16 * MIB},
            {Status.ERROR, Status.OUTPUT},
            "",
        ),
    ],
    ids=["time", "memory", "all memory", "processes", "files"],
)
def test_a_limit_ends_its_item_alone(
    workers: Workers, limits: dict[str, int], deed: dict[str, object], statuses: set[Status], said: str
) -> None:
    begun = workers.pool.session(setup="worker_misdeeds:setup", payload=None, limits=Limits(**limits))
    with begun as session:
        reply, after = session.ask(deed), session.ask({"do": "echo", "value": 1}, 60.0)
    assert reply.status in statuses, reply
    assert said in reply.message
    assert after.value == 1


def test_the_files_that_it_is_given_do_not_count_as_its_memory(workers: Workers) -> None:
    limits = Limits(memory_bytes=32 * MIB)
    taken = {Status.MEMORY, Status.ERROR}  # counted, or refused by the kernel
    begun = workers.pool.session(setup="worker_misdeeds:setup", payload=None, limits=limits)
    with begun as session, Shared(64 * MIB) as given:
        assert session.ask({"do": "touch"}, files=[given.fd]).value == 64 * MIB
        assert session.ask({"do": "share", "count": 128 * MIB}, files=[given.fd]).status in taken


def test_memory_of_calls_that_are_over_counts(workers: Workers) -> None:
    limits = Limits(memory_bytes=64 * MIB)
    with workers.pool.session(setup="worker_misdeeds:setup", payload=None, limits=limits) as session:
        statuses = []
        for _ in range(4):
            with Shared(32 * MIB) as given:
                statuses.append(session.ask({"do": "refill"}, files=[given.fd]).status)
    assert statuses == [*3 * [Status.OK], Status.MEMORY]


@pytest.mark.parametrize("size", [0, 32 * MIB, 128 * MIB])
def test_the_size_of_what_it_is_given_stays(workers: Workers, size: int) -> None:
    with workers.pool.session(setup="worker_misdeeds:setup", payload=None) as session, Shared(64 * MIB) as given:
        refused = session.ask({"do": "resize", "size": size}, files=[given.fd])
        assert refused.status is Status.ERROR
        assert os.fstat(given.fd).st_size == 64 * MIB


@pytest.mark.parametrize(
    ("setup", "seconds", "status", "said"),
    [
        ("fail", 60.0, Status.ERROR, "setup: "),
        ("hang", 0.5, Status.TIMEOUT, "0.5 s"),
        ("absent", 60.0, Status.ERROR, "absent"),
    ],
)
def test_a_failing_setup_costs_all_items(
    workers: Workers, setup: str, seconds: float, status: Status, said: str
) -> None:
    items = [{"do": "echo", "value": index} for index in range(3)]
    replies = workers.run(*items, setup=setup, payload="because", limits=Limits(setup_seconds=seconds))
    assert statuses(replies) == [status] * 3
    assert all(said in reply.message for reply in replies)


def test_files_in_a_given_scratch_folder_stay(workers: Workers, tmp_path: Path) -> None:
    reply, _ = workers.run(
        {"do": "write", "path": str(tmp_path / "kept")},
        {"do": "read", "path": str(tmp_path / "kept")},
        scratch=tmp_path,
    )
    assert reply.status is Status.OK, reply
    assert (tmp_path / "kept").read_text(encoding="utf-8") == "was here"


def test_a_worker_finds_its_folder_elsewhere_where_it_has_a_file_view_of_its_own(
    workers: Workers, tmp_path: Path
) -> None:
    if workers.pool.layers()["files"] != HOLDS:
        pytest.skip("no file view of its own")
    folder, at = tmp_path / "one", tmp_path / "other"
    folder.mkdir()
    with workers.pool.session(setup="worker_misdeeds:setup", payload=None, scratch=folder, at=at) as session:
        reply = session.ask({"do": "write", "path": str(at / "kept")})
    assert reply.status is Status.OK, reply
    assert (folder / "kept").exists()
    assert not at.exists()


def test_a_session_starts_one_worker_from_whatever_thread(workers: Workers) -> None:
    with workers.pool.session(setup="worker_misdeeds:setup", payload=None) as session:
        with ThreadPoolExecutor(2) as threads:
            for _ in range(2):
                threads.submit(session.start)
            first = session.ask({"do": "id"})
        assert session.ask({"do": "id"}).value == first.value
    with (
        ThreadPoolExecutor(1) as threads,
        workers.pool.session(setup="worker_misdeeds:hang", payload=None) as session,
    ):
        threads.submit(session.start)  # the session's end ends it
    assert session.ask({"do": "id"}).status is Status.CRASH


def test_several_threads_share_a_pool(workers: Workers) -> None:
    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(workers.run, {"do": "echo", "value": index}, {"do": "given"}) for index in range(6)]
        values = [[reply.value for reply in run.result()] for run in runs]
    assert values == [[index, None] for index in range(6)]


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with Pool(python="/nowhere/python", preload=()) as absent, pytest.raises(TraceproofError, match="/nowhere"):
        absent.layers()


def test_a_preload_that_does_not_import_is_named() -> None:
    with pool(preload=("no_such_module",)) as broken, pytest.raises(TraceproofError, match="no_such_module"):
        broken.layers()


def test_what_a_preload_names_is_called_where_it_is_there() -> None:
    own = pool(preload=("json:no_such_function", "worker_misdeeds:prepared"))
    with own, own.session(setup="worker_misdeeds:setup", payload=None) as session:
        assert session.ask({"do": "was_prepared"}).value is True


def test_a_preload_that_starts_threads_is_refused() -> None:
    with (
        pool(preload=("worker_misdeeds:thread",)) as broken,
        pytest.raises(TraceproofError, match="2 threads"),
    ):
        broken.layers()


def test_a_pool_outlives_its_interpreter(workers: Workers) -> None:
    assert statuses(workers.run({"do": "given"})) == [Status.OK]
    running = workers.pool._process
    assert running is not None
    running.kill()
    running.wait()
    assert statuses(workers.run({"do": "given"})) == [Status.OK]


@pytest.mark.parametrize("field", ["seconds", "memory_bytes", "output_bytes"])
def test_a_limit_must_be_positive(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})


SETUP = "traceproof.run.trusted:setup"
LIMITS = Limits(memory_bytes=1 << 28)


def obey(item: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what it is told to give
    match item["do"]:
        case "raise":
            raise ValueError("no such size")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            os._exit(3)
        case "sleep":
            time.sleep(ENDED)
        case "take":
            kept = b"1" * (1 << 29)
            time.sleep(ENDED)
            return len(kept)
    return {"pid": os.getpid(), "parent": os.getppid()}


def told(payload: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    del payload
    return obey


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A copy of this process, in which an item says what to do."""
    made = Worker(Environment(name="torch", python=sys.executable), f"{__name__}:told", {}, LIMITS)
    made.fork()
    yield made
    made.close()


ON_A_TERMINAL = """
import sys, time
from pathlib import Path
from traceproof.run import entry

def main():
    told = len([*Path("/proc/self/task").iterdir()])
    entry.TELLING.close()
    until = time.monotonic() + 60
    while len([*Path("/proc/self/task").iterdir()]) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    print(told, len([*Path("/proc/self/task").iterdir()]))

entry.run(main, log=Path(sys.argv[1]))
"""


def test_a_job_on_a_terminal_can_be_forked_once_nothing_is_told(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL, str(tmp_path / "log.txt")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, text=True, check=True)
    os.close(ours)
    os.close(terminal)
    assert done.stdout == "2 1\n"


@pytest.mark.parametrize(
    ("do", "status", "message"),
    [
        ("raise", Status.ERROR, "ValueError: no such size"),
        ("die", Status.CRASH, "the worker was killed by signal 9 (SIGKILL)"),
        ("leave", Status.CRASH, "the worker exited with code 3"),
        ("sleep", Status.TIMEOUT, "not done after 1 s"),
        ("take", Status.MEMORY, "took more than 268435456 bytes of memory"),
    ],
)
def test_how_an_item_ended_is_told(worker: Worker, *, do: str, status: Status, message: str) -> None:
    assert worker.ask({"do": "nothing"}).value["parent"] == os.getpid()
    outcome = worker.ask({"do": do}, 1.0 if do == "sleep" else None)
    assert outcome.status is status
    assert outcome.message.endswith(message)


def test_an_exception_costs_its_item_alone(worker: Worker) -> None:
    first = worker.ask({"do": "nothing"})
    worker.ask({"do": "raise"})
    assert worker.ask({"do": "nothing"}).value == first.value
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first.value["pid"], 0)


PREPARED = """
import os, sys
from traceproof.run.engine import Engine
from traceproof.run.workers import EngineSettings, Environment
from traceproof.dataset.definition import Definition
from traceproof.run.plan import PlanSelection, planned_alone

record = {"device_type": "cpu", "digest": "0"}
of = lambda name, python, path=(): Environment(name=name, python=python, record=record, path=path)
ours = sys.executable
environments = [of("torch", ours), of("fla", ours, (sys.argv[1],)), of("sglang", "/other/python")]
definition = Definition.model_validate_json(sys.stdin.read())
with Engine(EngineSettings(environments={one.name: one for one in environments})) as engine:
    entry = planned_alone(definition, PlanSelection(sizes=("small",)))
    engine.prepare([entry], ["reference", "torch", "fla", "sglang"])
    print(sorted(engine._workers), {worker._pid > 0 for one in engine._workers.values() for worker in one.queue})
"""


@pytest.mark.slow
def test_workers_of_the_interpreter_that_asks_are_forked(tmp_path: Path) -> None:
    given = json.dumps(rmsnorm("alpha"))
    command = [forked.interpreter(), "-c", PREPARED, str(tmp_path)]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "['fla', 'torch'] {True}\n"


@pytest.mark.slow
def test_one_that_died_is_replaced_by_an_interpreter_of_its_own() -> None:
    payload = {"device": "cpu", "threads": 1, "dataset": None}
    made = Worker(Environment(name="torch", python=sys.executable), SETUP, payload, LIMITS)
    item = {"implementation": "torch", "definition": {}, "digest": "0"}
    for _ in range(2):
        outcome = made.ask(item)
        assert outcome.status is Status.ERROR
        assert "ValidationError" in outcome.message
        os.kill(made._pid, signal.SIGKILL)
        os.waitid(os.P_PID, made._pid, os.WEXITED | os.WNOWAIT)
    made.close()


@pytest.mark.slow
def test_the_end_of_one_that_started_beside_others_is_seen() -> None:
    payload = {"device": "cpu", "threads": 1, "dataset": None}
    made = [Worker(Environment(name="torch", python=sys.executable), SETUP, payload, LIMITS) for _ in range(2)]
    asked = {"implementation": "none", "digest": ""}
    try:
        with ThreadPoolExecutor(2) as threads:
            found = [*threads.map(lambda one: one.ask(asked), made)]
        assert {one.status for one in found} == {Status.ERROR}
        for one in made:
            os.kill(one._pid, signal.SIGKILL)
            assert one.ask(asked).status in {Status.CRASH, Status.ERROR}
    finally:
        for one in made:
            one.close()
