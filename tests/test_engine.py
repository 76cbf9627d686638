"""From a dataset folder to verdict rows: what comes of each kind of case, and of what can not be run."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from definitions import GOOD, HIDDEN, rmsnorm, write, write_files, write_workloads
from dialect_samples import GATED
from pipeline import STACK, Run, engine_of, verdicts
from safetensors.torch import save_file
from solution_judge import candidate, solution_judge

from traceproof.dataset.definition import Definition, Dialect
from traceproof.dataset.tree import read_definition
from traceproof.errors import TraceproofError
from traceproof.judge.output import MISCONDUCT
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.formula import Variant
from traceproof.reasons import Skip, Verdict
from traceproof.run import engine as engines
from traceproof.run import judging
from traceproof.run.case import CPU, HOST_BYTES, SolvedCase, drawing_device, sent_together, solve
from traceproof.run.engine import DefinitionRun, Engine
from traceproof.run.judging import JudgedCase, LargeCase, Right
from traceproof.run.plan import PlanSelection, plan, planned_alone
from traceproof.run.schema import REFERENCE, OpTypePlan, PlannedDefinition
from traceproof.run.tensors import same_bits
from traceproof.run.untrusted import CaseResult, UntrustedSource
from traceproof.run.workers import EngineSettings, Environment
from traceproof.sandbox import Limits, Reply, Status
from traceproof.solutions import trial
from traceproof.stacks import MAIN, STACKS, TAGGED

pytestmark = pytest.mark.slow

LIMITS, BUILD = Limits(seconds=300.0, memory_bytes=2 << 30), 900.0
PASSED = {("pass", None)}
TRUTH = STACKS[TAGGED].truths[0].name


@cache
def here() -> Environment:
    """An environment whose workers are forked, which have PyTorch imported."""
    return Environment(name=MAIN, python=forked.interpreter(), record=STACK)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = tmp_path / "dataset"
    for name in ("alpha", "beta", "gamma"):
        write(root, rmsnorm(name))
    return root


def planned(dataset: Path, out: Path, **selected: Any) -> dict[str, PlannedDefinition]:  # noqa: ANN401 - of Selection
    plan(dataset, out, PlanSelection(sizes=("small",), **selected))
    [path] = [path for path in out.glob("*.json") if path.stem != "index"]
    return OpTypePlan.read(path).definitions


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of(EngineSettings(environments={MAIN: here()}, limits=LIMITS)) as made:
        yield made


def test_definitions_side_by_side_give_the_rows_that_they_give_alone(tmp_path: Path, engine: Engine) -> None:
    own = Path(__file__).parent / "dataset" / "definitions" / "rmsnorm"
    for path in (own / f"{name}_h96.json" for name in ("rmsnorm", "fused_add_rmsnorm")):
        write(tmp_path / "dataset", json.loads(path.read_text(encoding="utf-8")))
    entries = planned(tmp_path / "dataset", tmp_path / "cases")
    alone = [engine.rows(entry, (REFERENCE, "torch")) for entry in entries.values()]
    with ThreadPoolExecutor(3) as threads:
        beside = list(threads.map(lambda entry: engine.rows(entry, (REFERENCE, "torch")), entries.values()))
    told = ("case", "implementation", "output", "verdict", "reason", "gate", "digests")
    assert [[[getattr(row, name) for name in told] for row in rows] for rows in beside] == [
        [[getattr(row, name) for name in told] for row in rows] for rows in alone
    ]
    assert all(row.verdict == "pass" for rows in alone for row in rows)


def test_hidden_cases_are_the_reference_s_alone(dataset: Path, tmp_path: Path, engine: Engine) -> None:
    entry = planned(dataset, tmp_path / "cases")["alpha"]
    both = engine.rows(entry, (REFERENCE, "torch"))
    assert any(str(row.case).startswith("hidden") for row in both)
    assert {row.implementation for row in both if str(row.case).startswith("hidden")} == {REFERENCE}
    alone = engine.rows(entry, ("torch",))
    assert alone == [row for row in both if row.implementation == "torch"]


def test_what_a_definition_lacks_is_said_without_a_worker(
    dataset: Path, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = planned(dataset, tmp_path / "cases")["alpha"]
    without = {**entry.definition, "reference": "", "dialect": "flashinfer_trace_dump"}
    monkeypatch.setattr(Engine, "ask", None)
    monkeypatch.setattr(engine, "untrusted", None)
    rows = engine.rows(entry.model_copy(update={"definition": without}), (REFERENCE, TRUTH, "sglang_native"))
    assert {(row.implementation, row.verdict, row.reason) for row in rows} == {
        (REFERENCE, "skip", "no_reference"),
        (TRUTH, "skip", "no_cuda"),
        ("sglang_native", "skip", "package_absent"),
    }


@pytest.mark.parametrize("installed", [True, False])
def test_a_broken_package_is_an_error_and_an_absent_one_a_skip(
    dataset: Path, tmp_path: Path, *, installed: bool
) -> None:
    packages = tmp_path / "packages"
    if installed:
        metadata = "Metadata-Version: 2.1\nName: sglang\nVersion: 1.0\n"
        files = {
            "sglang-1.0.dist-info/METADATA": metadata,
            "sglang/srt/layers/layernorm.py": "import undeclared\n",
        }
        write_files(packages, files)
    other = Environment(name="sglang", python=forked.interpreter(), record=STACK, path=(str(packages),))
    with engine_of(EngineSettings(environments={MAIN: here(), "sglang": other}, limits=LIMITS)) as made:
        rows = made.rows(planned(dataset, tmp_path / "cases")["alpha"], ("sglang_native",))
    expected = ("error", "exception") if installed else ("skip", "package_absent")
    assert {(row.verdict, row.reason) for row in rows} == {expected}
    told = "sglang 1.0 can not be imported" if installed else "sglang is not installed"
    assert all(told in row.message for row in rows)
    assert all(("No module named 'undeclared'" in row.message) is installed for row in rows)


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
    write_workloads(dataset, "alpha", lines)
    selection = PlanSelection(definitions=("alpha",), sizes=("small",), workloads=True)
    rows = Run(dataset, tmp_path / "results", selection=selection, limits=LIMITS).verify("torch")["alpha"]
    by_case = {(row["case"], row["implementation"]): (row["verdict"], row["reason"]) for row in rows}
    for implementation in (REFERENCE, "torch"):
        assert (
            by_case["workload-one", implementation] == by_case["workload-three", implementation] == ("pass", None)
        )
        assert by_case["workload-two", implementation] == ("skip", "blob_missing")


def test_inputs_that_can_not_be_drawn_are_an_error(dataset: Path, tmp_path: Path, engine: Engine) -> None:
    entry = planned(dataset, tmp_path / "cases")["alpha"]
    first = entry.cases[0]
    gone = {"type": "safetensors", "path": str(tmp_path / "gone"), "tensor_key": "x"}
    described = {"inputs": {"hidden_states": gone, "weight": gone}}
    case = Case(first.id, first.case.size, first.case.axes, first.case.seed, described)
    rows = engine.rows(
        entry.holding([first.model_copy(update={"case": case, "repeat": False})]), (REFERENCE, "torch")
    )
    assert {(row.implementation, row.verdict, row.reason) for row in rows} == {
        (REFERENCE, "error", "exception"),
        ("torch", "error", "exception"),
    }
    for row in rows:
        assert "drawing the inputs: FileNotFoundError" in row.message.splitlines()[-1]
        assert "gone" in row.message


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_gpu_has_no_memory_for_or_is_lost_to_is_drawn_and_solved_by_a_cpu(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    asked: list[str] = []

    def on(device: torch.device) -> None:
        asked.append(device.type)
        if device.type == "cuda":
            raise RuntimeError("device-side assert") if lost else torch.OutOfMemoryError("CUDA out of memory")

    def draw_on(self: DefinitionRun, drawn: Any, device: torch.device) -> None:  # noqa: ANN401 - private
        on(device)
        return kept(self, drawn, device)

    kept = DefinitionRun._draw_on
    monkeypatch.setattr(DefinitionRun, "_draw_on", draw_on)
    monkeypatch.setattr(engines, "set_seed", lambda _seed, device: on(device))  # before the oracle
    monkeypatch.setattr(engines, "drawing_device", lambda _definition, _case, device: device)
    monkeypatch.setattr("traceproof.run.engine.cuda_is_lost", lambda: lost)
    monkeypatch.setattr(Engine, "not_built", lambda *_: None)
    entry = planned(dataset, tmp_path / "cases")["alpha"]
    monkeypatch.setattr(engines, "ORACLE_HOST_BYTES", 0)
    with engine_of(EngineSettings(environments={MAIN: here()}, limits=LIMITS)) as engine:
        run = DefinitionRun(engine, entry, ["torch"])
        engine.device = torch.device("cuda")
        rows = run.rows()
    assert {(row.verdict, row.reason) for row in rows} == PASSED
    assert asked.count("cuda") == (1 if lost else asked.count("cpu"))


@pytest.mark.parametrize("what", MISCONDUCT)
def test_what_the_second_run_alone_did_counts(what: str) -> None:
    done: dict[str, Any] = {what: ("y",)}
    first, second = CaseResult(), CaseResult(**done)
    run = object.__new__(DefinitionRun)
    run.same = same_bits
    assert getattr(run._joined(first, second, remembered=False), what) == ["y"]


@pytest.mark.parametrize(
    ("error", "large", "lost", "solved_by"),
    [
        (TypeError("no such dtype on this device"), False, False, "cpu"),
        (RuntimeError("device-side assert"), False, True, "cpu"),
        (torch.OutOfMemoryError("CUDA out of memory"), True, False, "cpu"),
        (RuntimeError("no such kernel on this device"), True, False, "nobody"),  # hours on a CPU
    ],
)
def test_a_solution_s_case_is_solved_by_the_rule_of_the_engine(  # noqa: PLR0913
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, *, large: bool, lost: bool,
    solved_by: str,
) -> None:  # fmt: skip
    tried: list[str] = []

    def on_device(_inputs: Values, device: torch.device) -> Values:
        tried.append(device.type)
        raise error

    monkeypatch.setattr(engines, "place", on_device)
    monkeypatch.setattr(engines, "set_seed", lambda *_: None)
    monkeypatch.setattr(engines, "cuda_is_lost", lambda: lost)
    monkeypatch.setattr(engines, "ORACLE_HOST_BYTES", 0 if large else 1 << 40)
    monkeypatch.setattr(trial, "drawing_device", lambda _definition, _case, device: device)
    entry = planned(dataset, tmp_path / "cases")["alpha"]
    subject = solve(entry.parsed, entry.cases[0].case)
    solution = candidate("norm", GOOD)
    with (
        solution_judge(tmp_path, dataset=dataset) as judge,
        trial.SolutionRun.of(entry.parsed, solution, judge.settings, judge.pool) as run,
    ):
        run.engine.device = torch.device("cuda")
        if solved_by == "nobody":
            with pytest.raises(RuntimeError, match="no such kernel"):
                run.solved(subject)
        else:
            assert torch.equal(run.solved(subject).oracle["output"], subject.oracle["output"])
            run.solved(subject)
        assert run.engine.computing.type == ("cpu" if lost else "cuda")
    assert tried == ["cuda"] * (1 if lost or solved_by == "nobody" else 2)


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
    selection = PlanSelection(sizes=("small",), memory_limit=1000)
    rows = Run(dataset, tmp_path / "results", selection=selection, limits=LIMITS).verify()["alpha"]
    skipped = [row for row in rows if row["reason"] == "does_not_fit"]
    assert skipped
    assert "GiB" in skipped[0]["message"]


def test_a_full_disk_ends_the_run_and_is_no_verdict(
    dataset: Path, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UntrustedSource, "run", full)
    with pytest.raises(TraceproofError, match="no space left"):
        engine.rows(planned(dataset, tmp_path / "cases")["alpha"], (REFERENCE,))


@pytest.mark.parametrize(("name", "device"), [(TRUTH, "cuda"), (TRUTH, "cpu"), ("torch", "cuda")])
def test_a_call_that_compiles_may_take_a_build_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, device: str
) -> None:
    write(tmp_path / "dataset", GATED)
    write(tmp_path / "dataset", {**rmsnorm("plain"), "op_type": GATED["op_type"]})
    entries = planned(tmp_path / "dataset", tmp_path / "cases")
    asked: dict[str, list[tuple[bool, float | None]]] = {}  # by definition: (whether there are rows, limit)

    def ask(_: str, item: Mapping[str, Any], seconds: float | None = None) -> Reply:
        rows = all(item["case"]["axes"].values())
        asked.setdefault(item["definition"]["name"], []).append((rows, seconds))
        return Reply(status=Status.ERROR)

    record = {**STACK, "device_type": "cpu"}
    environments = {one: Environment(name=one, python=sys.executable, record=record) for one in (MAIN, TAGGED)}
    with engine_of(EngineSettings(environments=environments, limits=LIMITS, build_seconds=BUILD)) as made:
        monkeypatch.setattr(made, "ask", ask)
        monkeypatch.setattr(made, "known", lambda *_: None)
        monkeypatch.setattr(made, "not_built", lambda *_: None)
        monkeypatch.setattr(made, "prepare", lambda *_: None)
        monkeypatch.setattr("traceproof.run.engine.drawing_device", lambda *_: torch.device("cpu"))
        made.device = torch.device(device)
        for entry in entries.values():
            first, *later = entry.cases
            empty = replace(first.case, axes=dict.fromkeys(first.case.axes, 0))
            cases = [first.model_copy(update={"case": empty}), *later]
            made.rows(entry.model_copy(update={"no_oracle": None, "cases": cases}), (name,))
    assert asked.keys() == {GATED["name"], "plain"}
    for definition, seen in asked.items():
        (without_rows, of_empty), (with_rows, of_first), *others = seen
        assert (without_rows, with_rows) == (False, True)
        compiles = device == "cuda"
        assert of_empty == of_first == (BUILD if compiles else LIMITS.seconds)
        always = compiles and name == TRUTH and definition == GATED["name"]  # the function that its tag names
        assert {seconds for _, seconds in others} == {BUILD if always else LIMITS.seconds}


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


IN_CHUNKS = ("small-1", "edge-empty", "adversarial-outlier", "hidden-0", "hidden-nan", "hidden-large")


@pytest.mark.parametrize("wrong", ["bfloat16)", "bfloat16) * 1.02", "bfloat16) * float('nan')", "float16)"])
def test_a_large_case_is_judged_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    dataset = tmp_path / "dataset"
    write(dataset, rmsnorm("alpha", GOOD.replace("bfloat16)", wrong)))
    found, selection = {}, PlanSelection(sizes=("small",), cases=IN_CHUNKS)
    for name, least in {"whole": 1 << 40, "chunks": 1}.items():
        monkeypatch.setattr("traceproof.run.plan.LARGE_BYTES", least)
        monkeypatch.setitem(judging.CHUNK_ELEMENTS, "cpu", 64)  # a few rows at a time
        run = Run(dataset, tmp_path / name, limits=LIMITS, selection=selection)
        found[name] = run.verify("torch")["alpha"]
    compared = ("case", "implementation", "output", "verdict", "reason")
    for whole, chunks in zip(found["whole"], found["chunks"], strict=True):
        assert whole["message"].startswith(chunks["message"])  # who agrees with whom is not said of large cases
        assert [chunks[key] for key in compared] == [whole[key] for key in compared]
        if "gate" in whole and whole["gate"].get("margin"):
            assert chunks["gate"]["margin"] == pytest.approx(whole["gate"]["margin"], rel=1e-9)


def judged_case(subject: SolvedCase, outputs: Mapping[str, Tensors]) -> JudgedCase:
    """A case whose implementations gave these outputs."""
    entry = planned_alone(subject.definition, PlanSelection(sizes=("small",)))
    return JudgedCase(
        entry=entry,
        definition=subject.definition,
        op=subject.op,
        planned=entry.cases[0].model_copy(update={"case": subject.case}),
        records={},
        inputs=subject.inputs,
        results={name: CaseResult(outputs=given) for name, given in outputs.items()},
    )


def test_an_input_that_is_written_to_is_judged_in_chunks_too() -> None:
    path = Path(__file__).with_name("dataset") / "definitions/rmsnorm/add_rmsnorm_fp4quant_h96.json"
    definition = read_definition(path).definition
    op, _ = registry.for_definition(definition)
    subject = solve(definition, Case("large", "large", {"n": 9, "blocks": 6, "one": 1}, 0, {}))
    right = op.varied(Variant("as it is"), subject)
    assert right is not None
    given = {"right": right, "wrong": {**right, "residual": subject.tensor("residual")}}
    made = LargeCase(judged_case(subject, given)).rulings(CPU)
    assert {name: one.verdict for name, one in made["right"].items()} == dict.fromkeys(right, Verdict.PASS)
    assert made["wrong"]["residual"].verdict is Verdict.FAIL


@pytest.mark.parametrize("large", [False, True])
def test_an_optional_output_that_is_left_out_is_unjudged(large: bool) -> None:  # noqa: FBT001 - a parameter
    path = Path(__file__).with_name("dataset") / "definitions/rmsnorm/fused_add_rmsnorm_quant_h96.json"
    described = read_definition(path).definition.as_json() | {"dialect": Dialect.TRACE_DUMP}
    described["outputs"]["residual_out"]["optional"] = True
    definition = Definition.model_validate(described)
    op, _ = registry.for_definition(definition)
    subject = solve(definition, next(iter(op.planned(definition, sizes=("small",), seed=0))))
    outputs = op.varied(Variant("as it is"), subject)
    assert outputs is not None
    judged = judged_case(subject, {"one": {"out": outputs["out"]}})
    judged.records, judged.right = {"one": {}}, Right(oracle=subject.oracle)
    judged.planned = judged.planned.model_copy(update={"large": large})
    judged.large = LargeCase(judged).rulings(CPU)
    assert {(row.output, row.reason) for row in judged.every} == {("out", None), ("residual_out", Skip.UNJUDGED)}


def test_without_figures_a_large_case_has_the_same_gate_and_tells_of_failures_alone() -> None:
    definition = Definition.model_validate(rmsnorm("alpha", GOOD))
    op, _ = registry.for_definition(definition)
    subject = solve(definition, Case("large", "large", {"batch_size": 9}, 0, {}))
    right = op.baseline(definition, subject.inputs)
    outputs = {"right": right, "wrong": {name: value * 1.5 for name, value in right.items()}}
    for name, given in outputs.items():
        case = judged_case(subject, {name: given})
        made = [LargeCase(case, figures=figures).rulings(CPU)[name]["output"] for figures in (True, False)]
        assert made[0].details["gate"] == made[1].details["gate"]
        assert bool(made[1].details.get("worst")) == (name == "wrong")


def test_an_implementation_that_saw_other_inputs_is_not_judged(dataset: Path, tmp_path: Path) -> None:
    entry = planned(dataset, tmp_path / "cases")["alpha"]
    definition = entry.parsed
    op, _ = registry.for_definition(definition)
    judged = JudgedCase(
        entry=entry,
        definition=definition,
        op=op,
        planned=entry.cases[0],
        results={"torch": CaseResult(inputs="1" * 32)},
        digest="0" * 32,
        records={"torch": STACK},
    )
    [row] = judged.every
    assert (row.verdict, row.reason, row.output) == ("error", "inputs_differ", "*")


def test_small_inputs_sent_together_are_what_they_were() -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    inputs: Values = {
        "one": torch.tensor(2.5, dtype=torch.float64),
        "two": None,
        "transposed": transposed,
        "three": torch.tensor([True, False, True]),
        "none": torch.empty(0),
        "column": torch.arange(3, dtype=torch.bfloat16).as_strided((1, 3), (7, 1)),
    }
    sent = sent_together(inputs, torch.device("cpu"))
    assert set(sent) == {"one", "three", "column"}
    for name, value in sent.items():
        given = inputs[name]
        assert isinstance(value, torch.Tensor)
        assert isinstance(given, torch.Tensor)
        assert (value.dtype, value.shape, value.stride()) == (given.dtype, given.shape, given.stride())
        assert torch.equal(value, given)
        assert value.data_ptr() != given.data_ptr()
