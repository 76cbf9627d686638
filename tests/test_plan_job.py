"""What a run asks its workers, which have torch: for plans, and what a stack is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from definitions import rmsnorm, write
from pipeline import sharing

from traceproof.bumps import keys
from traceproof.environments.building import Installation, probe
from traceproof.errors import TraceproofError
from traceproof.pipeline.stages.plan import plan
from traceproof.pipeline.stages.plan_job import planned
from traceproof.pipeline.stages.plan_selection import Selection
from traceproof.pipeline.stages.shards import Split
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.store import read_sealed
from traceproof.worker import Pool

ROOT = Path(__file__).resolve().parent.parent
SELECTION = Selection(sizes=("small",), hidden_seed=3)


@pytest.fixture(scope="module", autouse=True)
def in_a_run() -> Iterator[None]:
    with sharing():
        yield


@pytest.fixture
def pool() -> Iterator[Pool]:
    with StackWorkers.on_host().pool() as found:
        yield found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_worker_writes_the_plans_that_this_process_writes(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # as the rules give them, paths are relative
    dataset, split = Path("dataset"), Split(slots=2, actors=Path("actors"))
    write(dataset, rmsnorm("alpha"))
    write(dataset, rmsnorm("mystery", op_type="some_new_kernel"))
    plans = plan(dataset, Path("here"), SELECTION, None, split)
    assert planned(dataset, Path("there"), SELECTION, split, pool) == [Path("there") / path.name for path in plans]
    assert files(Path("there")) == files(Path("here"))


def test_definitions_with_an_init_are_not_planned_there(tmp_path: Path, pool: Pool) -> None:
    dataset, split = tmp_path / "dataset", Split(slots=1, actors=tmp_path / "actors")
    write(dataset, rmsnorm("alpha"))
    write(dataset, rmsnorm("beta", init="def init():\n    return {}\n"))
    assert planned(dataset, tmp_path / "cases", SELECTION, split, pool) is None
    chosen = replace(SELECTION, definitions=("alpha",))
    assert planned(dataset, tmp_path / "cases", chosen, split, pool) == [tmp_path / "cases" / "rmsnorm.json"]


def test_what_does_not_exist_is_told_as_this_process_tells_it(tmp_path: Path, pool: Pool) -> None:
    dataset, split = tmp_path / "dataset", Split(slots=1, actors=tmp_path / "actors")
    write(dataset, rmsnorm("alpha"))
    wrong = replace(SELECTION, op_types=("gmm",))
    with pytest.raises(TraceproofError) as here:
        plan(dataset, tmp_path / "cases", wrong)
    with pytest.raises(TraceproofError) as there:
        planned(dataset, tmp_path / "cases", wrong, split, pool)
    assert str(there.value) == str(here.value)


def test_a_stack_is_recorded_by_a_worker_as_by_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Installation("torch", None, sys.executable)
    expected = probe(stack, root=ROOT)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(keys, "has_driver", lambda: False)
    with monkeypatch.context() as patch:
        patch.setattr(keys, "probe", None)  # nor is it called
        keys.record_stack(stack, "", state="", linked=tmp_path, out=tmp_path / "stack.json")
    found = read_sealed(tmp_path / "stack.json")
    if expected["device_type"] == "cpu":
        assert {name: found[name] for name in expected} == expected
    with pytest.raises(TraceproofError, match="the stack 'torch' can not be used"):
        keys.record_stack(
            Installation("torch", None, "/bin/false"), "", state="", linked=tmp_path, out=tmp_path / "stack.json"
        )
