"""From a dataset folder to verdicts: what costs what, and what is done again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from definitions import GOOD, HIDDEN, rmsnorm, write
from dialect_samples import GATED
from pipeline import STACK, Run, sharing, verdicts
from safetensors import safe_open
from safetensors.torch import save_file

from traceproof.actors.execute import NO_SPACE
from traceproof.actors.registry import ACTORS
from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.execution.inputs import HOST_BYTES, drawing_device, fingerprints
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.pipeline.load import Load
from traceproof.pipeline.records import OpTypePlan
from traceproof.pipeline.stages import large
from traceproof.pipeline.stages.actor import _Trusted
from traceproof.pipeline.stages.actor import run as run_job
from traceproof.pipeline.stages.finished import Finished
from traceproof.pipeline.stages.job import Job
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.pipeline.stages.plan import plan
from traceproof.pipeline.stages.plan_selection import Selection
from traceproof.pipeline.stages.progress import Progress
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.stacks import STACKS, TAGGED
from traceproof.store import Store
from traceproof.worker import ItemOutcome, Limits, Pool, Status

pytestmark = pytest.mark.slow

LIMITS = Limits(seconds=20.0, memory_bytes=2 << 30)
PASSED = {("pass", None)}
TRUTH = STACKS[TAGGED].truths[0].name


@pytest.fixture(scope="module", autouse=True)
def one_run() -> Iterator[None]:
    """Jobs share interpreters, as those of a run do."""
    with sharing():
        yield


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = tmp_path / "dataset"
    for name in ("alpha", "beta", "gamma"):
        write(root, rmsnorm(name))
    return root


def outputs_on_disk(run: Run) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in (run.out / "store" / "outputs").rglob("*.json")}


def test_an_edit_of_one_reference_recomputes_that_definition_alone(dataset: Path, tmp_path: Path) -> None:
    run = Run(dataset, tmp_path / "results", limits=LIMITS)
    first = run.verify()
    assert {name: verdicts(rows) for name, rows in first.items()} == dict.fromkeys(
        ("alpha", "beta", "gamma"), PASSED
    )
    before = outputs_on_disk(run)
    write(dataset, rmsnorm("beta", GOOD.replace("torch.bfloat16)", "torch.bfloat16) * 1.02")))
    second = run.verify()
    after = outputs_on_disk(run)
    assert {name: after[name] for name in before} == before
    cases = len(run.manifest("rmsnorm", "reference").cases["beta"])
    assert len(after) - len(before) == 2 * cases
    assert verdicts(second["alpha"]) == verdicts(second["gamma"]) == PASSED
    assert ("fail", "numerics") in verdicts(second["beta"])


def test_lanes_give_the_records_that_one_gives(tmp_path: Path) -> None:
    own = Path(__file__).parent / "dataset" / "definitions" / "sampling"
    for name in ("top_k_sampling_from_probs_v1000", "top_p_sampling_from_probs_v1000"):
        write(tmp_path / "dataset", json.loads((own / f"{name}.json").read_text(encoding="utf-8")))
    run = Run(tmp_path / "dataset", tmp_path / "results", limits=LIMITS)
    [cases] = plan(run.dataset, run.out / "cases", Selection(sizes=("small",)))
    planned = OpTypePlan.read(cases).definitions
    found: list[dict[tuple[str, str], dict[str, str]]] = []
    for lanes in (1, 2):
        job = Job(actor="reference", code="0", stack=STACK, threads=1, limits=LIMITS, lanes=lanes)
        path = tmp_path / f"{lanes}.json"
        run_job(cases, path, tmp_path / f"store-{lanes}", job)
        store = Store(tmp_path / f"store-{lanes}", "outputs")
        found.append(
            {
                (name, case): fingerprints(dict(store.tensors(str(record.key))))
                for name, records in Manifest.read(path).cases.items()
                for case, record in records.items()
            }
        )
    assert list(found[0]) == [(name, case.id) for name, entry in planned.items() for case in entry.cases]
    assert list(found[0].items()) == list(found[1].items())


def test_an_oracle_of_small_cases_leaves_the_gpu_alone(dataset: Path, tmp_path: Path) -> None:
    [cases] = plan(dataset, tmp_path / "cases", Selection(sizes=("small",)))
    assert not Load(cases.parent, side_by_side=True).opens_gpu(cases.stem, "oracle")
    assert Load(cases.parent, side_by_side=True).opens_gpu(cases.stem, "reference")
    # Told to use a GPU, which need not be there: a case that was sent to it would fail, or be keyed as the GPU's.
    records = {}
    for device in ("cuda", "cpu"):
        stack_workers = StackWorkers(gpu=device == "cuda")
        job = Job(actor="oracle", code="0", stack=STACK, threads=1, limits=LIMITS, stack_workers=stack_workers)
        path = tmp_path / f"{device}.json"
        run_job(cases, path, tmp_path / "store", job)
        records[device] = Manifest.read(path).cases["alpha"]
    assert {record.status for record in records["cuda"].values()} == {"ok"}
    assert records["cuda"] == records["cpu"]


def test_what_a_definition_lacks_is_said_without_a_worker(dataset: Path, tmp_path: Path) -> None:
    [cases] = plan(dataset, tmp_path / "cases", Selection(sizes=("small",)))
    planned = json.loads(cases.read_text(encoding="utf-8"))
    for entry in planned["definitions"].values():
        entry["no_oracle"] = "nobody wrote one"
        entry["definition"] |= {"reference": "", "dialect": "flashinfer_trace_dump"}
        for case in entry["cases"]:
            case["memory"] = ACTORS["oracle"].host_bytes + 1
    cases.write_text(json.dumps(planned), encoding="utf-8")
    limits = replace(LIMITS, seconds=0.001)  # in which no worker does anything
    for actor in ("oracle", "reference"):
        assert not Load(cases.parent, side_by_side=True).opens_gpu(cases.stem, actor)
        job = Job(actor=actor, code="0", stack=STACK, threads=1, limits=limits)
        run_job(cases, tmp_path / f"{actor}.json", tmp_path / "store", job)
        records = Manifest.read(tmp_path / f"{actor}.json").cases
        reasons = {record.reason for found in records.values() for record in found.values()}
        assert reasons == {f"no_{actor}"}


def test_an_oracle_of_a_large_case_uses_the_gpu_for_it_alone(dataset: Path, tmp_path: Path) -> None:
    [cases] = plan(dataset, tmp_path / "cases", Selection(sizes=("small",)))
    planned = json.loads(cases.read_text(encoding="utf-8"))
    large, *small = planned["definitions"]["alpha"]["cases"]
    large["memory"] = ACTORS["oracle"].host_bytes + 1
    cases.write_text(json.dumps(planned), encoding="utf-8")
    assert Load(cases.parent, side_by_side=True).opens_gpu(cases.stem, "oracle")
    assert ACTORS["oracle"].device("cuda", large["memory"]) == "cuda"
    assert {ACTORS["oracle"].device("cuda", case["memory"]) for case in small} == {"cpu"}
    large["skip"] = {"reason": "does_not_fit", "message": "nothing to open a GPU for"}
    cases.write_text(json.dumps(planned), encoding="utf-8")
    assert not Load(cases.parent, side_by_side=True).opens_gpu(cases.stem, "oracle")


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_that_cannot_be_imported_is_an_error_and_an_absent_one_a_skip(
    dataset: Path, tmp_path: Path, *, installed: bool
) -> None:
    packages = tmp_path / "packages"
    if installed:
        for name, text in {
            "sglang-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 1.0\n",
            "sglang/srt/layers/layernorm.py": "import undeclared\n",
        }.items():
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / name).write_text(text)
    [cases] = plan(dataset, tmp_path / "cases", Selection(sizes=("small",)))
    source = Path(__file__).parent.parent / "src"
    stack_workers = StackWorkers(environment={"PYTHONPATH": os.pathsep.join(map(str, (packages, source)))})
    job = Job(actor="sglang_native", code="0", stack=STACK, threads=1, limits=LIMITS, stack_workers=stack_workers)
    run_job(cases, tmp_path / "manifest.json", tmp_path / "store", job)
    records = Manifest.read(tmp_path / "manifest.json").cases["alpha"]
    expected = ("error", "exception") if installed else ("skip", "package_absent")
    assert {(record.status, record.reason) for record in records.values()} == {expected}
    told = "sglang 1.0 can not be imported" if installed else "sglang is not installed"
    assert all(told in record.message for record in records.values())
    assert all(("No module named 'undeclared'" in record.message) is installed for record in records.values())


def test_a_changed_description_recomputes_nothing(dataset: Path, tmp_path: Path) -> None:
    run = Run(dataset, tmp_path / "results", limits=LIMITS)
    run.verify()
    before = outputs_on_disk(run)
    write(dataset, rmsnorm("beta", description="now with words", tags=["status:verified"]))
    run.verify()
    assert outputs_on_disk(run) == before


def test_a_malformed_file_costs_itself_alone(dataset: Path, tmp_path: Path) -> None:
    (dataset / "definitions" / "rmsnorm" / "torn.json").write_text('{"name": "torn", ', encoding="utf-8")
    rows = Run(dataset, tmp_path / "results", limits=LIMITS).verify()
    assert verdicts(rows["torn"]) == {("error", "bad_definition")}
    assert "torn.json" in rows["torn"][0]["message"]
    assert verdicts(rows["alpha"]) == PASSED


def test_a_workload_line_is_a_case_and_a_missing_blob_is_a_typed_skip(dataset: Path, tmp_path: Path) -> None:
    random = {"type": "random"}
    blob = {"type": "safetensors", "path": "blob/absent.safetensors", "tensor_key": "w"}
    (dataset / "blob").mkdir()
    save_file({"weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}, dataset / "blob" / "there.safetensors")
    there = {"type": "safetensors", "path": "./blob/there.safetensors", "tensor_key": "weight"}
    lines = [
        {"uuid": "one", "axes": {"batch_size": 3}, "inputs": {"hidden_states": random, "weight": random}},
        {"uuid": "three", "axes": {"batch_size": 3}, "inputs": {"hidden_states": random, "weight": there}},
        {"uuid": "two", "axes": {"batch_size": 3}, "inputs": {"hidden_states": random, "weight": blob}},
    ]
    path = dataset / "workloads" / "rmsnorm" / "alpha.jsonl"
    path.parent.mkdir(parents=True)
    empty = {"definition": "alpha", "solution": None, "evaluation": None}
    path.write_text("".join(json.dumps(empty | {"workload": line}) + "\n" for line in lines), encoding="utf-8")
    selection = Selection(definitions=("alpha",), sizes=("small",), workloads=True)
    rows = Run(dataset, tmp_path / "results", selection=selection, limits=LIMITS).verify()["alpha"]
    by_case = {row["case"]: (row["verdict"], row["reason"]) for row in rows}
    assert by_case["workload-one"] == by_case["workload-three"] == ("pass", None)
    assert by_case["workload-two"] == ("skip", "blob_missing")


def test_an_unknown_op_type_is_judged_by_its_own_float64_alone(tmp_path: Path) -> None:
    root = tmp_path / "dataset"
    write(root, rmsnorm("mystery", op_type="some_new_kernel"))
    rows = Run(root, tmp_path / "results", limits=LIMITS).verify()["mystery"]
    assert verdicts(rows) == {("pass", None)}
    assert {(row["against"], row["grade"]) for row in rows if "grade" in row} == {("shadow", "consistent")}
    write(root, rmsnorm("mystery", GOOD.replace("bfloat16)", "float16)"), op_type="some_new_kernel"))
    rows = Run(root, tmp_path / "results", limits=LIMITS).verify()["mystery"]
    assert ("fail", "dtype") in verdicts(rows)


def test_a_case_that_does_not_fit_is_a_skip_that_states_the_need(dataset: Path, tmp_path: Path) -> None:
    selection = Selection(sizes=("small",), memory_limit=1000)
    rows = Run(dataset, tmp_path / "results", selection=selection, limits=LIMITS).verify()["alpha"]
    skipped = [row for row in rows if row["reason"] == "does_not_fit"]
    assert skipped
    assert "GiB" in skipped[0]["message"]


def test_a_killed_job_leaves_finished_cases_and_the_next_run_does_the_rest(dataset: Path, tmp_path: Path) -> None:
    run = Run(dataset, tmp_path / "results", limits=LIMITS)
    child = os.fork()
    if child == 0:
        run.verify()
        os._exit(0)
    deadline = time.monotonic() + 60
    while not outputs_on_disk(run) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    before = outputs_on_disk(run)
    rows = run.verify()
    after = outputs_on_disk(run)
    assert before
    assert {name: after[name] for name in before} == before
    assert verdicts(rows["gamma"]) == PASSED


def test_the_plan_names_what_does_not_exist(dataset: Path, tmp_path: Path) -> None:
    selection = Selection(op_types=("gmm",), definitions=("alpah",))
    with pytest.raises(TraceproofError) as caught:
        plan(dataset, tmp_path / "cases", selection)
    assert "'gmm'" in str(caught.value)
    assert "there are: rmsnorm" in str(caught.value)
    assert "close to it: alpha" in str(caught.value)


def test_every_registered_op_calls_itself_by_its_module() -> None:
    assert {name: registry.get(name).op_type for name in registry.known()} == {n: n for n in registry.known()}


def test_a_full_disk_ends_the_job_and_is_no_verdict(dataset: Path, tmp_path: Path) -> None:
    full = "Error while serializing: I/O error: No space left on device (os error 28)"  # as safetensors tells it
    assert NO_SPACE.search(full)
    assert not NO_SPACE.search(full.replace("28", "2"))
    run = Run(dataset, tmp_path / "results", limits=LIMITS)
    run.verify()
    job = Job(actor="oracle", code="0", stack=STACK, threads=1, limits=LIMITS)
    store = Store(run.out / "store", "outputs")
    with Pool() as pool:
        finished = Finished(job=job, outputs=store, progress=Progress("", 1))
        runner = _Trusted(finished, pool, tmp_path, str(dataset))
        outcome = ItemOutcome(index=0, status=Status.OK, value={"no_space": full})
        with pytest.raises(TraceproofError, match="no space left while writing"):
            runner._record("0" * 64, outcome)
    assert store.record("0" * 64) is None


class _Asked:
    """In the place of a pool and of its session: answers nothing, and notes what was asked in what time."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, float | None]] = []

    @contextmanager
    def session(self, **options: object) -> Iterator[_Asked]:
        del options
        yield self

    def ask(self, item: dict[str, Any], seconds: float | None = None) -> ItemOutcome:
        index = len(self.asked)
        self.asked.append((item["definition"], item["case"]["id"], seconds))
        return ItemOutcome(index=index, status=Status.ERROR)


@pytest.mark.parametrize(
    ("actor", "gpu", "allowed"), [(TRUTH, True, 300.0), (TRUTH, False, 20.0), ("torch", True, 20.0)]
)
def test_the_first_call_of_a_function_that_a_tag_names_may_take_a_build_s_time(
    tmp_path: Path, *, actor: str, gpu: bool, allowed: float
) -> None:
    write(tmp_path / "dataset", GATED)
    write(tmp_path / "dataset", {**rmsnorm("plain"), "op_type": GATED["op_type"]})
    [cases] = plan(tmp_path / "dataset", tmp_path / "cases", Selection(sizes=("small",)))
    asked, workers = _Asked(), StackWorkers(gpu=gpu)
    job = Job(
        actor=actor, code="0", stack=STACK, threads=1, limits=LIMITS, build_seconds=300.0, stack_workers=workers
    )
    finished = Finished(job=job, outputs=Store(tmp_path / "store", "outputs"), progress=Progress("", 1))
    runner = _Trusted(finished, cast("Pool", asked), tmp_path, "")
    runner.together(OpTypePlan.read(cases).definitions)
    first = {name: seconds for name, _, seconds in reversed(asked.asked)}
    assert first == {GATED["name"]: allowed, "plain": 20.0}
    assert {seconds for *_, seconds in asked.asked} == {None, *first.values()}


def test_few_inputs_are_drawn_on_the_host() -> None:
    definition = Definition.model_validate(rmsnorm("alpha", GOOD))
    gpu, host = torch.device("cuda"), torch.device("cpu")
    row = 2 * HIDDEN
    assert drawing_device(definition, Case("few", "small", {"batch_size": 7}, 0, {}), gpu) == host
    many = Case("many", "large", {"batch_size": HOST_BYTES // row}, 0, {})  # and the weight beside them
    assert drawing_device(definition, many, gpu) == gpu
    assert drawing_device(definition, many, host) == host
    described = rmsnorm("packed", GOOD)
    described["inputs"]["weight"]["dtype"] = "float4_e2m1"  # which torch has no element type for
    packed = Definition.model_validate(described)
    assert drawing_device(packed, Case("few", "small", {"batch_size": 7}, 0, {}), gpu) == host


@pytest.mark.parametrize("wrong", [None, 1.02, float("nan")])
def test_a_large_case_is_judged_in_chunks_as_it_would_be_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float | None
) -> None:
    dataset = tmp_path / "dataset"
    code = GOOD if wrong is None else GOOD.replace("torch.bfloat16)", f"torch.bfloat16) * float('{wrong}')")
    write(dataset, rmsnorm("alpha", code))
    found = {}
    for name, least in {"whole": 1 << 40, "chunks": 1}.items():
        monkeypatch.setattr(large, "LARGE_BYTES", least)
        monkeypatch.setitem(large.CHUNK_ELEMENTS, "cpu", 64)  # a few rows at a time
        run = Run(dataset, tmp_path / name, limits=LIMITS, selection=Selection(sizes=("small", "medium")))
        found[name] = run.verify("torch")["alpha"]
        stored = [
            path for path in (run.out / "store" / "outputs").rglob("*.safetensors") if "@" in str(keys(path))
        ]
        cases = len(run.manifest("rmsnorm", "oracle").cases["alpha"])
        assert len(stored) == (1 if name == "chunks" else cases)  # the empty case is no large one
    compared = ("case", "actor", "output", "verdict", "reason")
    for whole, chunks in zip(found["whole"], found["chunks"], strict=True):
        assert whole["message"].startswith(chunks["message"])  # who agrees with whom is not said of large cases
        assert [chunks[key] for key in compared] == [whole[key] for key in compared]
        if "gate" in whole and whole["gate"].get("margin"):
            assert chunks["gate"]["margin"] == pytest.approx(whole["gate"]["margin"], rel=1e-9)


def keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as tensors:
        return list(tensors.keys())


def test_a_large_case_whose_inputs_the_judge_draws_otherwise_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = tmp_path / "dataset"
    write(dataset, rmsnorm("alpha"))
    monkeypatch.setattr(large, "LARGE_BYTES", 1)
    run = Run(dataset, tmp_path / "results", limits=LIMITS)
    run.verify()
    manifest = run.manifest("rmsnorm", "reference")
    found = manifest.of("alpha").items()
    other = {case: record.model_copy(update={"inputs": "0" * 32}) for case, record in found}
    path = run.out / "actors" / "rmsnorm" / "reference.json"
    manifest.model_copy(update={"cases": {"alpha": other}}).write(path)
    rows = run.judge("rmsnorm", "reference", "oracle")
    assert {(row["verdict"], row["reason"]) for row in rows if row["output"] == "*"} >= {
        ("error", "inputs_differ")
    }
    assert not any(
        row["verdict"] == "pass" and row["output"] == "output" and row["axes"]["batch_size"] for row in rows
    )
