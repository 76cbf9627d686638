"""Fixtures that several files of tests share."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from traceproof.sandbox import Pool

if TYPE_CHECKING:
    from solution_judge import SolutionJudge

# The files that take longest: several processes take a file at a time, and none is left with one of these at last.
LONGEST = (
    *("ops", "exploits", "pipeline", "interrupts", "every_form", "solutions", "chain", "api", "examples"),
    *("lab", "testgen_runs", "ops_sampling", "worker_isolation", "extract_definitions", "other_suites"),
    *("testgen", "publish_push", "bumps", "nox", "compiled", "formats", "doctor", "engine", "hostile", "fetch"),
    *("border", "sources_checkout", "adapters_sglang", "stress", "judge", "shadow", "imports", "draw", "plan"),
    "ops_families",
)


# Of several processes that run tests: this one, e.g. gw1, and how many they are.
WORKER, WORKERS = (os.environ.get(f"PYTEST_XDIST_WORKER{of}", "") for of in ("", "_COUNT"))
if WORKER:
    sys.dont_write_bytecode = False  # what one of several processes makes of a file's assertions serves the others


# How long an example takes says nothing on a busy machine.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# An eighth of the tests' time went into looking for cycles in what is imported and collected, which stays anyway.
gc.disable()
atexit.register(gc.freeze)


def pytest_collection_finish() -> None:
    """Go on collecting garbage, of the tests alone."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Start each of several processes at another file: each rewrites the assertions of its share, not of all."""
    report = yield
    if WORKER and report.result:
        start = len(report.result) * int(WORKER.removeprefix("gw")) // int(WORKERS)
        if isinstance(report.result[-1], pytest.Module):
            report.result = report.result[start:] + report.result[:start]
    return report


# Of tests that take each definition of ours in turn, the fast ones take the first of each op_type.
OWN = Path(__file__).parent / "dataset" / "definitions"
FURTHER = {path.stem for op_type in OWN.iterdir() for path in sorted(op_type.glob("*.json"))[1:]}
IN_TURN = 100  # a test with more parameters is such a one


@pytest.hookimpl(tryfirst=True)  # before those of other marks than `-m` names are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, then other slow ones, each of them whole; all processes have one order."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (order.get(item.path.name, len(order)), item.path not in slow, item.path))
    counts = Counter(item.nodeid.partition("[")[0] for item in items)
    for item in items:
        test, _, parameters = item.nodeid.rstrip("]").partition("[")
        if counts[test] > IN_TURN and not FURTHER.isdisjoint(parameters.split("-")):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers for untrusted code: one interpreter for all files, until this process ends."""
    from pipeline import borrowed  # imports torch

    with borrowed() as found:
        yield found


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SolutionJudge]:
    """A judge of solutions over the tests' dataset."""
    from solution_judge import solution_judge  # imports torch

    with solution_judge(tmp_path_factory.mktemp("judging")) as found:
        yield found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch with one thread: small cases are faster so, and forks of a process with many threads hang."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
