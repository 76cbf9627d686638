"""The job verify and its cache: what is computed together, what is kept, and what damage costs."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from definitions import rmsnorm, write
from repository import DEFINITIONS, Repository

from traceproof.cli import main
from traceproof.errors import TraceproofError
from traceproof.reasons import Error, Failure, Skip, Unavailable, Verdict
from traceproof.run.cache import FILE, Cache, key_of_file
from traceproof.run.engine import Engine
from traceproof.run.job import Job
from traceproof.run.plan import PlanSelection, plan
from traceproof.run.schema import (
    GROUP,
    INDEX,
    PAIR,
    REFERENCE,
    WHOLE,
    GateResult,
    Index,
    Listed,
    OpTypePlan,
    PlannedDefinition,
    RowDigests,
    VerdictRow,
    each_row,
    rows_text,
)
from traceproof.run.workers import EngineSettings, Environment
from traceproof.stacks import MAIN

RECORD = {"digest": "main", "versions": {}, "device": "cpu"}
RECORDS = {MAIN: RECORD, "flashinfer": {**RECORD, "digest": "f"}, "sglang": {**RECORD, "digest": "s"}}
TRUTHS = ("flashinfer", "sglang")
Changes = dict[str, Any]


@dataclass
class Stub:
    """In the engine's place: rows that pass, but for `changes`, and a note of what was asked."""

    changes: Callable[[str, str, int], Changes] = lambda *_: {}
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def prepare(self, entries: Collection[PlannedDefinition], implementations: Sequence[str]) -> None:
        del entries, implementations

    def rows(self, entry: PlannedDefinition, implementations: Sequence[str]) -> list[VerdictRow]:
        definition = str(entry.definition["name"])
        self.asked.append((definition, tuple(implementations)))
        rows = []
        passed = [name for name in TRUTHS if name in implementations and not self.changes(name, definition, 0)]
        pairs = [PAIR.join(TRUTHS)] if len(passed) > 1 else []
        for name in (*implementations, *pairs):
            for case in entry.cases:
                if case.hidden and name != REFERENCE:
                    continue
                row = VerdictRow(
                    definition=definition,
                    op_type="rmsnorm",
                    case=case.id,
                    implementation=name,
                    against="oracle",
                    output="output",
                    verdict=Verdict.PASS,
                    gate=GateResult(kind="stub", margin=0.5),
                    repeat="--seed 0",
                )
                rows.append(row.changed(**self.changes(name, definition, len(self.asked))))
        return rows

    def job(self, **changes: Any) -> Job:  # noqa: ANN401 - its fields
        @contextmanager
        def engine(_: EngineSettings) -> Iterator[Engine]:
            yield cast("Engine", self)

        records = changes.pop("records", RECORDS)
        given = {name: changes.pop(name) for name in ("code", "tolerance") if name in changes}
        environments = {name: Environment(name=name, python="", record=one) for name, one in records.items()}
        settings = EngineSettings(environments=environments, **{"code": "0", **given})
        fields: dict[str, Any] = {"implementations": (REFERENCE, *TRUTHS), "settings": settings, "engine": engine}
        return Job(**fields | changes)


@pytest.fixture
def planned(tmp_path: Path) -> OpTypePlan:
    for name in ("alpha", "beta"):
        write(tmp_path / "dataset", rmsnorm(name))
    plan(tmp_path / "dataset", tmp_path / "cases", PlanSelection(sizes=("small",)))
    return OpTypePlan.read(tmp_path / "cases" / "rmsnorm.json")


@pytest.fixture
def verify(planned: OpTypePlan, tmp_path: Path) -> Callable[..., list[VerdictRow]]:
    """Runs a job with the cache of the test, and gives its rows."""

    def run(stub: Stub, **changes: Any) -> list[VerdictRow]:  # noqa: ANN401 - fields of a job
        verdicts = tmp_path / "verdicts" / "rmsnorm.jsonl"
        stub.job(**{"plan": planned, "cache": tmp_path / "cache.sqlite"} | changes).verify(verdicts)
        return [*each_row(verdicts)]

    return run


Verify = Callable[..., list[VerdictRow]]
EVERY = tuple(sorted((REFERENCE, *TRUTHS)))


def test_what_is_kept_is_not_computed_again_and_comes_out_alike(verify: Verify, planned: OpTypePlan) -> None:
    first, again = Stub(), Stub()
    rows = verify(first)
    assert first.asked == [("alpha", EVERY), ("beta", EVERY)]
    assert verify(again) == rows
    assert again.asked == []
    cases = [case.id for case in planned.definitions["alpha"].cases]
    shown = [case.id for case in planned.definitions["alpha"].cases if not case.hidden]
    alpha = [row for row in rows if row.definition == "alpha"]
    assert [row.case for row in alpha] == [*shown, *cases, *shown, *shown]
    assert list(dict.fromkeys(row.implementation for row in alpha)) == [
        "flashinfer",
        REFERENCE,
        "sglang",
        "flashinfer~sglang",
    ]
    assert {row.repeat.split(" --case")[0] for row in alpha} == {"traceproof verify --definition-name alpha"}
    assert {str(row.grade) for row in alpha if row.implementation == REFERENCE} >= {"proved"}


def test_a_change_costs_what_depends_on_it(verify: Verify, planned: OpTypePlan) -> None:
    verify(Stub())
    bumped = Stub()
    verify(bumped, records={**RECORDS, "sglang": {**RECORD, "digest": "new"}})
    assert bumped.asked == [(name, TRUTHS) for name in ("alpha", "beta")]  # pairs need both outputs
    edited = Stub()
    beta = planned.definitions["beta"].model_copy(update={"digest": "new"})
    verify(edited, plan=planned.model_copy(update={"definitions": {**planned.definitions, "beta": beta}}))
    assert edited.asked == [("beta", EVERY)]
    tagged, of_beta = Stub(), planned.definitions["beta"].definition | {"tags": ["fi_api:flashinfer.norm.rmsnorm"]}
    beta = planned.definitions["beta"].model_copy(update={"definition": of_beta})
    verify(tagged, plan=planned.model_copy(update={"definitions": {**planned.definitions, "beta": beta}}))
    assert tagged.asked == [("beta", TRUTHS)]
    hidden = Stub()
    others = {name: entry.model_copy(update={"nonce": 7}) for name, entry in planned.definitions.items()}
    verify(hidden, plan=planned.model_copy(update={"definitions": others}))
    assert hidden.asked == [("alpha", (REFERENCE,)), ("beta", (REFERENCE,))]
    fewer = Stub()
    verify(fewer, implementations=(REFERENCE, "sglang"))
    assert fewer.asked == []
    for changes in (
        {"code": "1"},
        {"force": True},
        {"tolerance": 0.5},
        {"records": {MAIN: RECORD | {"digest": ""}}},
    ):
        stub = Stub()
        verify(stub, **changes)
        assert len(stub.asked) == 2, changes


def test_a_disputed_definition_is_computed_together(verify: Verify) -> None:
    def disputed(name: str, definition: str, call: int) -> Changes:  # noqa: ARG001 - as `Stub.changes`
        wrong = name == "sglang" and definition == "alpha"
        return {"verdict": Verdict.FAIL, "reason": Failure.NUMERICS} if wrong else {}

    verify(Stub())
    stub = Stub(disputed)
    newer = {**RECORDS, "sglang": {**RECORD, "digest": "new"}}
    rows = verify(stub, records=newer)
    assert stub.asked == [("alpha", TRUTHS), ("alpha", EVERY), ("beta", TRUTHS)]
    assert {row.replay for row in rows if row.verdict is Verdict.FAIL} != {""}
    same = Stub(disputed)
    assert verify(same, records=newer) == rows
    assert same.asked == []
    other = Stub(disputed)
    verify(other, records={**newer, "flashinfer": {**RECORD, "digest": "new"}})
    assert other.asked == [("alpha", EVERY), ("beta", TRUTHS)]


@pytest.mark.parametrize("reason", [Error.TIMEOUT, Error.MEMORY, Error.CRASH, Error.ORACLE])
def test_what_the_machine_may_have_done_is_not_kept(verify: Verify, reason: Error) -> None:
    def failing(name: str, definition: str, call: int) -> Changes:  # noqa: ARG001 - as `Stub.changes`
        wrong = name == REFERENCE and definition == "alpha"
        return {"verdict": Verdict.ERROR, "reason": reason, "message": "m"} if wrong else {}

    first = Stub(failing)
    verify(first)
    assert first.asked == [("alpha", EVERY)] * (2 if reason is Error.CRASH else 1) + [("beta", EVERY)]
    again = Stub()
    assert {row.verdict for row in verify(again)} == {Verdict.PASS}
    assert again.asked == [("alpha", (REFERENCE,))]


def test_a_process_that_was_killed_from_outside_is_no_verdict(verify: Verify) -> None:
    def killed(name: str, definition: str, call: int) -> Changes:  # noqa: ARG001 - as `Stub.changes`
        return {"verdict": Verdict.ERROR, "reason": Error.CRASH, "message": "m"} if call == 1 else {}

    assert {row.verdict for row in verify(Stub(killed))} == {Verdict.PASS}


def test_definitions_that_were_done_before_a_job_ended_are_found(verify: Verify) -> None:
    def ending(name: str, definition: str, call: int) -> Changes:  # noqa: ARG001 - as `Stub.changes`
        if definition == "beta":
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        verify(Stub(ending))
    after = Stub()
    verify(after)
    assert after.asked == [("beta", EVERY)]


def test_a_skip_is_kept_and_bundles_of_an_earlier_run_go(verify: Verify, tmp_path: Path) -> None:
    def skipped(name: str, definition: str, call: int) -> Changes:  # noqa: ARG001 - as `Stub.changes`
        return {"verdict": Verdict.SKIP, "reason": Skip.NO_CUDA} if name != REFERENCE else {}

    (tmp_path / "replay" / "rmsnorm" / "gone").mkdir(parents=True)
    verify(Stub(skipped))
    assert not (tmp_path / "replay" / "rmsnorm").exists()
    again = Stub()
    verify(again)
    assert again.asked == []


def test_what_the_plan_skips_whole_asks_no_engine(verify: Verify, planned: OpTypePlan) -> None:
    skip = Unavailable(Skip.DOES_NOT_FIT, "needs about 99.0 GiB")
    alpha = planned.definitions["alpha"]
    large = alpha.holding(case.model_copy(update={"skip": skip}) for case in alpha.cases)
    stub = Stub()
    rows = verify(stub, plan=planned.model_copy(update={"definitions": {"alpha": large}}))
    assert stub.asked == []
    cases = [case.id for case in alpha.cases]
    assert [(row.implementation, row.case) for row in rows] == [(name, case) for name in EVERY for case in cases]
    assert {(row.verdict, row.reason, row.message, row.output) for row in rows} == {
        (Verdict.SKIP, Skip.DOES_NOT_FIT, "needs about 99.0 GiB", "*")
    }
    assert {row.digests.environment for row in rows} == {one["digest"] for one in RECORDS.values()}


def test_a_large_op_type_has_groups_by_name(planned: OpTypePlan, tmp_path: Path) -> None:
    alpha = planned.definitions["alpha"]
    entries = {f"d{number:03}": alpha for number in range(GROUP + 3)}
    entries["d000@scaled-down"] = alpha.model_copy(update={"scaled_down": "hidden_size 7 -> 5"})
    whole = planned.model_copy(update={"definitions": entries})
    jobs = whole.jobs
    assert list(jobs) == ["rmsnorm.1-of-2", "rmsnorm.2-of-2"]
    assert list(jobs["rmsnorm.1-of-2"].jobs) == ["rmsnorm"]
    second = jobs["rmsnorm.2-of-2"]
    assert list(second.definitions) == [f"d{number:03}" for number in range(GROUP, GROUP + 3)]
    for name, job in jobs.items():
        (tmp_path / f"{name}.json").write_text(job.as_text(), encoding="utf-8")
    of = dict.fromkeys(("mem_mb", "gpu_mb", "parallel", "builds", "seconds"), 1)
    index = Index(
        dataset="", op_types={"rmsnorm": Listed.model_validate({"digests": dict.fromkeys(jobs, ""), **of})}
    )
    (tmp_path / INDEX).write_text(index.as_text(), encoding="utf-8")
    assert OpTypePlan.read_all(tmp_path, "rmsnorm") == whole
    (tmp_path / "rmsnorm.1-of-2.json").unlink()  # a part is no plan
    with pytest.raises(TraceproofError, match=r"rmsnorm.1-of-2.json can not be read"):
        OpTypePlan.read_all(tmp_path, "rmsnorm")
    stub = Stub()
    stub.job(plan=second, group=".2-of-2").verify(tmp_path / "verdicts" / "rmsnorm.2-of-2.jsonl")
    assert len(stub.asked) == 3


def test_damaged_plans_are_planned_again(planned: OpTypePlan, tmp_path: Path) -> None:
    del planned
    path = tmp_path / "cases" / "rmsnorm.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"trials":0', '"trials":1', 1), encoding="utf-8")
    with pytest.raises(Exception, match="changed after it was written"):
        OpTypePlan.read(path)
    assert not (tmp_path / "cases" / "index.json").exists()
    plan(tmp_path / "dataset", tmp_path / "cases", PlanSelection(sizes=("small",)), code="1")
    first = path.stat().st_mtime_ns
    assert json.loads(path.read_text(encoding="utf-8"))["definitions"].keys() == {"alpha", "beta"}
    plan(tmp_path / "dataset", tmp_path / "cases", PlanSelection(sizes=("small",)), code="1")
    assert path.stat().st_mtime_ns == first


def test_lanes_give_the_rows_that_one_gives(verify: Verify) -> None:
    assert verify(Stub(), parallel=2, cache=None) == verify(Stub(), cache=None)


ENTRIES = {f"key {number}": {"rows": [{"definition": f"d{number}", "message": "ä"}] * 20} for number in range(200)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Cache(tmp_path / "results" / FILE) as cache:
        cache.put(ENTRIES)
        cache.put({"key 0": {"rows": []}})
    return tmp_path / "results" / FILE


def test_what_was_put_is_found_by_another_process(path: Path) -> None:
    with Cache(path) as cache:
        assert cache.get([*ENTRIES, "none"]) == {**ENTRIES, "key 0": {"rows": []}}
        assert cache.get([]) == {}


def test_two_processes_write_side_by_side(path: Path) -> None:
    code = (
        "import sys, pathlib; from traceproof.run.cache import Cache\n"
        "with Cache(pathlib.Path(sys.argv[1])) as cache:\n"
        "    for number in range(100): cache.put({f'{sys.argv[2]} {number}': number})\n"
    )
    others = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in ("a", "b", "c")]
    assert [other.wait() for other in others] == [0, 0, 0]
    wanted = {f"{name} {number}": number for name in ("a", "b", "c") for number in range(100)}
    with Cache(path) as cache:
        assert cache.get(wanted) == wanted


def test_a_damaged_file_gives_what_was_put_or_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, draw = path.read_bytes(), random.Random(0)  # noqa: S311 - damage
    for number in range(60):
        data = bytearray(whole)
        if number % 3 == 0:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif number % 3 == 1:
            del data[draw.randrange(len(data)) :]
        else:
            start = draw.randrange(len(data))
            data[start : start + 5000] = draw.randbytes(len(data[start : start + 5000]))
        path.write_bytes(data)
        with Cache(path) as cache:
            found = cache.get(ENTRIES)
            assert all(value in (ENTRIES[key], {"rows": []}) for key, value in found.items())
            cache.put({"new": number})
            assert cache.get(["new"]) == {"new": number}
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["NULL", "5", "'text'"])
def test_an_entry_of_another_type_is_not_there(path: Path, value: str) -> None:
    with sqlite3.connect(path) as damaged:
        damaged.execute(f"UPDATE rows SET value = {value} WHERE key = 'key 1'")  # noqa: S608 - of the test
    with Cache(path) as cache:
        assert cache.get(["key 1", "key 2"]).keys() == {"key 2"}


def test_a_full_disk_says_so(path: Path) -> None:
    with Cache(path) as cache:
        cache.get(["key 1"])
        assert cache._connection is not None
        cache._connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(TraceproofError, match="no space left while writing"):
            cache.put({f"more {number}": os.urandom(999).hex() for number in range(99)})
        assert cache.get(["key 1", "more 1"]) == {"key 1": ENTRIES["key 1"]}


def test_clean_removes_what_no_run_shows_or_what_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = Repository.copy(tmp_path, dataset={"path": str(DEFINITIONS.parent)})
    monkeypatch.chdir(repository.root)
    results = repository.root / "results"
    ago = time.time() - 10 * 86400
    with monkeypatch.context() as then, Cache(results / FILE) as cache:
        then.setattr(time, "time", lambda: ago)
        cache.put({"shown": [], "hidden": []})
    row = VerdictRow(
        definition="a",
        op_type="b",
        case="c",
        implementation=REFERENCE,
        output=WHOLE,
        verdict=Verdict.PASS,
        digests=RowDigests(outputs="shown"),
    )
    (results / "selections" / "s" / "verdicts").mkdir(parents=True)
    verdicts = results / "selections" / "s" / "verdicts" / "b.jsonl"
    verdicts.write_text(rows_text([row.as_json()]))
    mark = key_of_file(verdicts, results / FILE)
    with monkeypatch.context() as then, Cache(results / FILE) as cache:
        then.setattr(time, "time", lambda: ago)
        cache.put({mark: ""})

    def cleaned(*options: str) -> tuple[int, set[str]]:
        with pytest.raises(SystemExit) as caught:
            main(["clean", *options, "--json", "-"])
        assert caught.value.code == 0
        with Cache(results / FILE) as cache:
            return json.loads(capsys.readouterr().out)["objects"], {key for key, *_ in cache.entries()}

    assert cleaned("--unreachable", "--dry-run") == (1, {"shown", "hidden", mark})
    assert cleaned("--unreachable") == (1, {"shown", mark})
    assert cleaned("--older-than", "11") == (0, {"shown", mark})
    assert cleaned("--older-than", "9") == (1, {mark})
    with pytest.raises(SystemExit):
        main(["clean"])
    assert "nothing says what may go" in capsys.readouterr().err
