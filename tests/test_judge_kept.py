"""What was judged is not judged again, in whatever run; what is judged is read and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from definitions import GOOD, rmsnorm, write
from pipeline import Rows, Run, sharing

from traceproof.errors import TraceproofError
from traceproof.pipeline.stages.judge import judge
from traceproof.pipeline.stages.judge_settings import JudgeSettings
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.worker import Limits, Pool

LIMITS = Limits(seconds=20.0, memory_bytes=2 << 30)
WRONG = GOOD.replace("+ EPS", "+ 1.0")
ACTORS = ("reference", "oracle", "torch")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Of a right and a wrong reference, judged."""
    write(tmp_path / "dataset", rmsnorm("alpha"))
    write(tmp_path / "dataset", rmsnorm("beta", WRONG))
    found = Run(tmp_path / "dataset", tmp_path / "results", limits=LIMITS)
    found.verify("torch")
    return found


class _NoPool(Pool):
    """Gives no worker."""

    def __init__(self) -> None: ...

    def session(self, **_: Any) -> Any:  # noqa: ANN401 - as it is
        raise AssertionError("a worker was asked for")


def judged(run: Run, *, pool: Pool | None = None, options: str = "", code: str = "0") -> Rows:
    cases, folder = run.out / "cases" / "rmsnorm.json", run.out / "actors" / "rmsnorm"
    settings = JudgeSettings(store=run.out / "store", code=code, tolerance=None, options=options)
    verdicts = run.out / "verdicts" / "rmsnorm.jsonl"
    judge(cases, [folder / f"{actor}.json" for actor in ACTORS], verdicts, settings, pool or _NoPool())
    return [json.loads(line) for line in verdicts.read_text(encoding="utf-8").splitlines()]


def test_rows_that_are_kept_are_those_of_the_run_before(run: Run) -> None:
    verdicts = run.out / "verdicts" / "rmsnorm.jsonl"
    before, bundles = verdicts.read_bytes(), sorted((run.out / "replay").rglob("*"))
    rows = judged(run)
    assert verdicts.read_bytes() == before
    assert sorted((run.out / "replay").rglob("*")) == bundles
    assert {row["definition"] for row in rows if row["verdict"] == "fail"} == {"beta"}


def test_commands_are_those_of_this_run(run: Run) -> None:
    before = judged(run)
    options = '--dataset "ä" -- --config a=\'"b\\c"\''
    rows = judged(run, options=options)
    assert [row["repeat"] for row in rows] == [f"{row['repeat']} {options}" for row in before]
    failing = next(row for row in rows if row["verdict"] == "fail")
    replay = json.loads((run.out / failing["replay"] / "replay.json").read_text(encoding="utf-8"))
    assert replay["repeat"] == failing["repeat"]


def test_an_edit_judges_that_definition_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = judged(run)
    write(run.dataset, rmsnorm("beta"))
    asked: list[str] = []
    session = Pool.session

    def noted(self: Pool, **given: Any) -> Any:  # noqa: ANN401 - as it is
        asked.append(given["setup"])
        return session(self, **given)

    monkeypatch.setattr(Pool, "session", noted)
    rows = run.verify("torch")
    assert sum(setup.endswith("definition_judge:setup") for setup in asked) == 1
    assert rows["alpha"] == [row for row in before if row["definition"] == "alpha"]
    assert {row["verdict"] for row in rows["beta"]} <= {"pass", "skip"}


def test_outputs_that_were_changed_are_found_out_when_they_are_judged(run: Run) -> None:
    before = judged(run)
    record = run.manifest("rmsnorm", "torch").cases["alpha"]["small-0"]
    path = run.out / "store" / "outputs" / str(record.key)[:2] / f"{record.key}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert judged(run) == before  # by rows whose records say what the outputs were
    with sharing(), StackWorkers().pool() as pool, pytest.raises(TraceproofError, match="damaged"):
        judged(run, pool=pool, code="1")
    assert not list((run.out / "actors" / "rmsnorm").glob("*.json"))  # so that jobs run again
    assert run.verify("torch", code="1")["alpha"] == [row for row in before if row["definition"] == "alpha"]


def test_kept_rows_that_were_edited_are_judged_again(run: Run) -> None:
    before = judged(run)
    for path in (run.out / "store" / "judged").rglob("*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace("pass", "fail"), encoding="utf-8")
    with sharing(), StackWorkers().pool() as pool:
        assert judged(run, pool=pool) == before
