"""Jobs of a large op_type, split so that several run at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from definitions import rmsnorm, write
from pipeline import STACK, Run, typed

from traceproof.errors import TraceproofError
from traceproof.ops.cases import Case
from traceproof.pipeline.load import Load
from traceproof.pipeline.records import OpTypePlan, PlannedCase, PlannedDefinition, shard_names
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.actor import run
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.lanes import dealt
from traceproof.pipeline.stages.manifest import Manifest, manifests_of
from traceproof.pipeline.stages.shards import FEWEST, Split
from traceproof.worker import Limits

OP_TYPE = "rmsnorm"
MANY = 64
SLOTS = 4
LIMITS = Limits(seconds=20.0, memory_bytes=2 << 30)


def planned(count: int, *, trials: int = 100) -> OpTypePlan:
    """A plan of definitions with a case each, which an estimate takes for 1.5 s of a reference."""
    case = PlannedCase(
        case=Case("small-0", "small", {"batch_size": 1}, 0, {}),
        digest="0" * 32,
        memory=0,
        trials=trials,
        skip=None,
        large=False,
        nonce=0,
    )
    entries = {
        name: PlannedDefinition(
            path=f"{name}.json",
            digest="0" * 32,
            no_oracle=None,
            nonce=0,
            definition=rmsnorm(name),
            cases=(case,),
        )
        for name in map("definition{:03d}".format, range(count))
    }
    return OpTypePlan(op_type=OP_TYPE, dataset="", definitions=entries, broken=())


def split_of(folder: Path, slots: int = SLOTS) -> Split:
    return Split(slots=slots, actors=folder / "actors")


def manifest(folder: Path, seconds: dict[str, float], shard: str = "") -> Path:
    """A reference's manifest that an earlier run left."""
    cases = {name: {"small-0": RunRecord(key="0", status="ok", seconds=took)} for name, took in seconds.items()}
    path = folder / "actors" / OP_TYPE / f"reference{shard}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    Manifest(actor="reference", op_type=OP_TYPE, code="0", environment={}, cases=cases).write(path)
    return path


def test_every_definition_is_in_one_shard(tmp_path: Path) -> None:
    plan = split_of(tmp_path).applied(planned(MANY))
    counts = Counter(name for shard in plan.shards["reference"] for name in shard)
    assert len(plan.shards["reference"]) == SLOTS
    assert counts == dict.fromkeys(plan.definitions, 1)


def test_what_takes_seconds_stays_one_job(tmp_path: Path) -> None:
    assert "oracle" not in split_of(tmp_path).applied(planned(MANY)).shards


def test_few_definitions_stay_one_job_however_long_they_take(tmp_path: Path) -> None:
    assert split_of(tmp_path).applied(planned(2 * FEWEST - 1, trials=10_000)).shards == {}


def test_one_slot_splits_nothing(tmp_path: Path) -> None:
    assert split_of(tmp_path, slots=1).applied(planned(MANY)).shards == {}


def test_the_same_plan_is_split_the_same(tmp_path: Path) -> None:
    first, second = (split_of(tmp_path).applied(planned(MANY)).as_text() for _ in range(2))
    assert first == second
    assert OpTypePlan.model_validate_json(first).as_text() == first


def test_measured_costs_decide_where_there_are_any(tmp_path: Path) -> None:
    plan = planned(MANY)
    slow, *others = plan.definitions
    manifest(tmp_path, {slow: 600.0} | dict.fromkeys(others[: MANY // 2], 1.0))
    shards = split_of(tmp_path).applied(plan).shards["reference"]
    assert (slow,) in shards


def test_what_was_measured_scales_the_estimates_of_the_rest(tmp_path: Path) -> None:
    plan = planned(MANY)
    known = dict.fromkeys(list(plan.definitions)[:4], 12.0)
    costs = split_of(tmp_path).costs(plan, "reference", known)
    assert costs == pytest.approx(dict.fromkeys(plan.definitions, 12.0))


def test_manifests_of_another_split_are_removed(tmp_path: Path) -> None:
    stale = [manifest(tmp_path, {"definition000": 5.0}, shard) for shard in ("", ".1-of-2", ".3-of-3")]
    kept = manifest(tmp_path, {"definition000": 5.0}, f".1-of-{SLOTS}")
    other = kept.with_name("reference_other.json")
    other.touch()
    split_of(tmp_path).applied(planned(MANY))
    assert [path.exists() for path in (*stale, kept, other)] == [False, False, False, True, True]


def test_parts_cost_about_the_same() -> None:
    costs = {str(number): float(number) for number in range(1, 41)}
    loads = [sum(costs[name] for name in part) for part in dealt(costs, 5)]
    assert max(loads) - min(loads) <= 1.0


def test_the_rules_ask_for_one_job_per_shard(tmp_path: Path) -> None:
    plan = split_of(tmp_path).applied(planned(MANY))
    (tmp_path / f"{OP_TYPE}.json").write_text(plan.as_text())
    load = Load(tmp_path, side_by_side=False)
    assert load.shards(OP_TYPE, "reference") == [".1-of-4", ".2-of-4", ".3-of-4", ".4-of-4"]
    assert load.shards(OP_TYPE, "oracle") == [""]


@pytest.mark.parametrize("shard", [".5-of-4", ".1-of-3", ".0-of-4"])
def test_a_shard_that_is_not_of_the_plan_is_refused(tmp_path: Path, shard: str) -> None:
    plan = split_of(tmp_path).applied(planned(MANY))
    with pytest.raises(TraceproofError, match="no shard"):
        plan.of_shard("reference", shard)


def test_shards_give_the_verdicts_of_one_job_and_run_nothing_twice(tmp_path: Path) -> None:
    for name in ("alpha", "beta", "gamma"):
        write(tmp_path / "dataset", rmsnorm(name))
    whole = Run(tmp_path / "dataset", tmp_path / "results", limits=LIMITS)
    before = whole.verify()
    outputs = {path: path.stat().st_mtime_ns for path in (whole.out / "store").rglob("*.json")}
    cases = whole.out / "cases" / f"{OP_TYPE}.json"
    shards = {"reference": (("alpha", "gamma"), ("beta",))}
    cases.write_text(OpTypePlan.read(cases).model_copy(update={"shards": shards}).as_text())
    folder = whole.out / "actors" / OP_TYPE
    (folder / "reference.json").unlink()
    for shard in shard_names(2):
        job = Job(actor="reference", code="0", stack=STACK, threads=1, limits=LIMITS)
        run(cases, folder / f"reference{shard}.json", whole.out / "store", job, shard=shard)
    assert len(manifests_of(folder, "reference")) == len(shards["reference"])
    after = whole.judge(OP_TYPE, "oracle", *(f"reference{shard}" for shard in shard_names(2)))
    assert typed(after) == typed(row for rows in before.values() for row in rows)
    assert {path: path.stat().st_mtime_ns for path in (whole.out / "store").rglob("*.json")} == outputs
