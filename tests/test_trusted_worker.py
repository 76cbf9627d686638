"""The process that runs ground truths: what it answers, and how its end is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import Limits, Status

SETUP = "traceproof.run.trusted:setup"
LIMITS = Limits(seconds=5.0, memory_bytes=1 << 28)


def obey(item: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what it is told to give
    match item["do"]:
        case "raise":
            raise ValueError("no such size")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            os._exit(3)
        case "sleep":
            time.sleep(60.0)
        case "take":
            kept = b"1" * (1 << 29)
            time.sleep(60.0)
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
            assert one.ask(asked, seconds=5.0).status in {Status.CRASH, Status.ERROR}
    finally:
        for one in made:
            one.close()
