"""Cases that show what the ordinary ones do not: of size stress, and hidden ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import op_support as ops
import pytest
import torch
from definitions import HIDDEN, rmsnorm, write, write_workloads
from pipeline import Rows, Run, plans, row, summarise, told, verdicts
from safetensors.torch import save_file
from test_hostile import RIGHT, reference

from traceproof.config import Config
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.ops import far, registry
from traceproof.ops.adapter import Adapter, Api, Outputs, Signature
from traceproof.ops.attention import operands_of
from traceproof.ops.base import Tensors, Values, rounded
from traceproof.ops.cases import AFTER, SIZES, STRESS, Case
from traceproof.ops.families.routing import Method, Weigh, sum_one
from traceproof.ops.formula import Variant
from traceproof.publish.verified import implementation_verdicts
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve
from traceproof.run.hidden import hidden_cases, hidden_seed
from traceproof.run.known import Known
from traceproof.run.plan import PlanSelection
from traceproof.run.report import table
from traceproof.run.schema import OpTypePlan, VerdictRow
from traceproof.run.trusted import Implementation
from traceproof.sandbox import Limits, policy
from variants import variants_of

OURS = {name: entry.definition for name, entry in read_tree(Path(__file__).parent / "dataset").definitions.items()}
PAGED = OURS["gqa_paged_decode_h40_kv8_d128_ps16"]
ROUTED = OURS["moe_fp8_block_scale_ds_routing_topk4_ng4_kg2_e8_h512_i256"]
CHEAP = 1 << 30
MASK = -50_000.0


def stress(definition: Definition) -> Iterator[Case]:
    yield from registry.get(definition.op_type).of_form(definition).stress(definition, seed=0)


def case(definition: Definition, name: str) -> Case:
    return next(one for one in stress(definition) if one.id == name)


def refused(subject: SolvedCase, outputs: Tensors) -> bool:
    rulings = [subject.ruling(name, outputs[name]) for name in subject.definition.outputs]
    return any(ruling.verdict is not Verdict.PASS for ruling in rulings)


def ordinary(definition: Definition) -> Iterator[SolvedCase]:
    op = registry.get(definition.op_type).of_form(definition)
    for one in op.cases(definition, sizes=("small",), seed=0):
        yield solve(definition, one)


def test_stress_is_a_size_that_runs_only_where_it_is_asked_for() -> None:
    dataset = {"dataset": "anywhere"}
    assert STRESS not in Config.model_validate(dataset).test_sizes
    chosen = Config.model_validate(dataset | {"test_sizes": ["stress", "small"]}).test_sizes
    assert chosen == ("small", "stress")
    op = registry.get(PAGED.op_type)
    assert not any(one.size == STRESS for one in op.planned(PAGED, sizes=SIZES, seed=0))
    assert any(one.size == STRESS for one in op.planned(PAGED, sizes=[STRESS], seed=0))


def test_where_all_tokens_are_queries_no_stress_case_has_many() -> None:
    assert 1 < max(max(one.params["kv_lens"]) for one in stress(OURS["trtllm_fmha_packed_h3_d32"])) < 1000


@pytest.mark.parametrize("definition", OURS.values(), ids=OURS)
def test_right_answers_pass_the_cheap_stress_cases(definition: Definition) -> None:
    op, unknown = registry.for_definition(definition)
    assert unknown is None
    lengthy = ("stress-long", "stress-long-slow")
    for one in stress(definition):
        if op.memory(definition, one) < CHEAP and one.id not in lengthy:
            subject = solve(definition, one)
            outputs = variants_of(definition.op_type)[0].make(subject)
            assert outputs is not None
            assert not refused(subject, outputs), one.id


def filled_mask(subject: SolvedCase) -> Tensors:
    """Attention over whole pages, the tail of a last page masked by a number that raw products go below."""
    operands = operands_of(subject.definition, subject.inputs)
    full = torch.full_like(subject.tensor("kv_last_page_len"), 16)
    whole = operands_of(subject.definition, subject.with_inputs(kv_last_page_len=full))
    output, lse = [], []
    for right, span in zip(operands.spans, whole.spans, strict=True):
        keys = whole.k[span.rows].float().repeat_interleave(5, 1)
        values = whole.v[span.rows].float().repeat_interleave(5, 1)
        raw = torch.einsum("hd,lhd->hl", whole.q[span.start].float(), keys)
        raw[:, len(right.rows) :] = MASK
        logits = raw * whole.scale
        output.append(torch.einsum("hl,lhd->hd", torch.softmax(logits, -1), values))
        lse.append(torch.logsumexp(logits, -1) / torch.log(torch.tensor(2.0)))
    return rounded(subject.definition, {"output": torch.stack(output), "lse": torch.stack(lse)})


def test_a_mask_filled_with_a_number_is_refused_by_products_below_it_and_by_no_other_size() -> None:
    subject = solve(PAGED, case(PAGED, "stress-below"))
    assert refused(subject, filled_mask(subject))
    assert not refused(subject, subject.op.baseline(PAGED, subject.inputs))
    full = [one for one in ordinary(PAGED) if min(one.case.params["kv_lens"]) > 0]
    assert len(full) > 3
    assert not any(refused(one, filled_mask(one)) for one in full)


def left_beside_the_bias(logits: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Weights by score plus bias, less the bias again, in float32."""
    assert bias is not None
    return sum_one(((torch.sigmoid(logits) + bias) - bias).gather(-1, experts) + 1e-20)


def mixture(subject: SolvedCase, weigh: Mapping[Method, Weigh]) -> Tensors:
    """The mixture with other weights."""
    found = Variant("mixture", weigh=weigh).make(subject)
    assert found is not None
    return found


def test_a_sigmoid_taken_back_from_score_plus_bias_is_refused_by_faint_ones_and_by_no_other_size() -> None:
    subject = solve(ROUTED, case(ROUTED, "stress-faint"))
    assert float(torch.sigmoid(subject.tensor("routing_logits")).max()) < 1e-5
    taken_back = {Method.DEEPSEEK: left_beside_the_bias}
    assert refused(subject, mixture(subject, taken_back))
    assert not refused(subject, mixture(subject, {}))
    assert not any(refused(one, mixture(one, taken_back)) for one in ordinary(ROUTED))


FAR_CASES = [
    pytest.param(definition, one, id=f"{name}-{one.id}")
    for name, definition in OURS.items()
    for one in stress(definition)
    if far.SIZE in one.params
]


def enlarged(definition: Definition) -> far.Far:
    found = registry.get(definition.op_type).of_form(definition).enlarged(definition)
    assert found is not None
    return found


def nearer(definition: Definition, one: Case) -> Case:
    """The case with an axis that a test can hold: three and a bit times the case's own."""
    own = one.axes[enlarged(definition).axis]
    return replace(one, params={**one.params, far.SIZE: 3 * own + 5})


@pytest.mark.parametrize(("definition", "one"), FAR_CASES)
def test_a_kernel_gets_more_elements_than_32_bits_count(definition: Definition, one: Case) -> None:
    found, op = enlarged(definition), registry.get(definition.op_type)
    axes = {**one.axes, found.axis: one.params[far.SIZE]}
    specs = [spec for spec in definition.inputs.values() if found.axis in (spec.shape or ())]
    most = max(torch.Size(definition.shape_of(spec, axes) or ()).numel() for spec in specs)
    if one.id in {"stress-far", "stress-far-apart"}:
        assert most > (1 << 32 if found.slots or found.unsigned else 1 << 31)
    assert found.bytes(definition, one) > most
    assert op.of_form(definition).memory(definition, one) < CHEAP  # what the reference and the oracle need
    one = nearer(definition, one)
    subject = solve(definition, one)
    given = found.enlarge(definition, one, subject.inputs)
    outputs = variants_of(definition.op_type)[0].make(replace(subject, inputs=given))
    assert outputs is not None
    assert not refused(subject, found.kept(definition, one, outputs))


@pytest.mark.parametrize("name", ["gdn_mtp_qk2_v4_d32_k_last", "mamba_ssu_decode_h8_d16_s32_ng2"])
def test_a_slot_whose_address_wraps_is_refused(name: str) -> None:
    definition = OURS[name]
    one, found = nearer(definition, case(definition, "stress-far")), enlarged(definition)
    subject = solve(definition, one)
    given = found.enlarge(definition, one, subject.inputs)
    (slots,) = found.slots
    named, size = given[slots], one.params[far.SIZE]
    assert isinstance(named, torch.Tensor)
    assert (named >= size // 2).any()
    wrong = variants_of(definition.op_type)[0].make(replace(subject, inputs={**given, slots: named % (size // 2)}))
    assert wrong is not None
    assert refused(subject, found.kept(definition, one, wrong))


def test_a_stress_case_that_does_not_fit_is_a_skip(tmp_path: Path) -> None:
    path = tmp_path / "dataset" / "definitions" / "rmsnorm" / "narrow.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(rmsnorm("narrow")))
    (written,) = plans(tmp_path / "dataset", tmp_path / "cases", PlanSelection(sizes=(STRESS,)))
    cases = {one.id: one for one in OpTypePlan.read(written).definitions["narrow"].cases}
    skip = cases["stress-far"].skip
    assert skip is not None
    assert skip.reason == "does_not_fit"
    assert "no scaled-down definition" not in skip.message
    assert all(one.skip is None for name, one in cases.items() if name != "stress-far")


class Wrapper:
    """Takes the lengths of its first plan for those of every later one."""

    def __init__(self) -> None:
        self.longest: int | None = None

    def plan(self, lengths: torch.Tensor, *, stale: bool) -> None:
        if self.longest is None or not stale:
            self.longest = int(lengths.max())


@pytest.mark.parametrize("stale", [False, True])
def test_what_an_object_keeps_of_another_case_shows(*, stale: bool) -> None:
    truth, op = Implementation("torch"), registry.get(PAGED.op_type)

    def longest(api: Api, definition: Definition, inputs: Values) -> Outputs:
        del definition
        lengths, wrapper = inputs["kv_indptr"], api["wrapper"]()
        assert isinstance(lengths, torch.Tensor)
        wrapper.plan(lengths.diff(), stale=stale)
        return {"output": torch.tensor(wrapper.longest)}

    names = Signature(frozenset(PAGED.inputs), frozenset(), frozenset({"output"}), None)
    truth._adapter, truth.api = Adapter("planned", names, longest, ()), {"wrapper": Wrapper}
    reused = case(PAGED, "stress-reused")
    earlier = next(one for one in op.cases(PAGED, sizes=SIZES, seed=0) if one.id == reused.params[AFTER])
    first, second = (solve(PAGED, one).inputs for one in (earlier, reused))
    fresh = int(truth.run(PAGED, second)["output"])
    truth.begin(PAGED, first)
    assert (int(truth.run(PAGED, second)["output"]) != fresh) is stale
    assert int(truth.run(PAGED, second)["output"]) == fresh


LIMITS = Limits(seconds=300.0, memory_bytes=1 << 30)
SELECTION = PlanSelection(sizes=("small",), hidden_seed=123_456_789)
WRONG = "return norm(hidden_states, weight) * 1.5"
COUNTED = "\nCALLS = []\n"
# Right under one condition that a fixed set of cases in one process can not break.
CONDITIONS = {
    "at_planned_sizes": f"if hidden_states.shape[0] in SIZES:\n    {RIGHT}\n{WRONG}",
    "at_fewer_than_100_rows": f"if len(hidden_states) < 100:\n    {RIGHT}\n{WRONG}",
    "but_for_the_last_of_many_rows": (
        "y = norm(hidden_states, weight)\nif len(y) > 100:\n    y[-1] *= 1.5\nreturn y"
    ),
    "without_nan": "return norm(hidden_states.nan_to_num(posinf=float('inf')), weight)",
    "without_infinity": "return norm(hidden_states.clamp(-500, 500), weight)",
    "with_one_thread": f"if torch.get_num_threads() == 1:\n    {RIGHT}\n{WRONG}",
    "where_memory_is_poisoned": f"if torch.empty(1).isnan().item():\n    {RIGHT}\n{WRONG}",
    "by_its_name": f"if __name__.startswith('reference_of'):\n    {RIGHT}\n{WRONG}",
    "up_to_the_fourth_call": f"CALLS.append(1)\nif len(CALLS) < 4:\n    {RIGHT}\n{WRONG}",
    "after_the_first_call": f"CALLS.append(1)\nif len(CALLS) > 1:\n    {RIGHT}\n{WRONG}",
    "on_inputs_of_seed_0": (f"if round(float(hidden_states.double().sum()), 3) in SUMS:\n    {RIGHT}\n{WRONG}"),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The fixed cases: what anybody can compute."""
    root = tmp_path_factory.mktemp("known")
    write(root, rmsnorm("alpha"))
    [path] = plans(root, root / "cases", SELECTION)
    cases = json.loads(path.read_text(encoding="utf-8"))["definitions"]["alpha"]["cases"]
    return [case for case in cases if not case.get("hidden")]


def sums(name: str, planned: list[dict[str, object]]) -> list[float]:
    """What a reference that knows seed 0 could look its inputs up by."""
    from traceproof.ops.cases import Case
    from traceproof.run.case import make_inputs

    definition = Definition.model_validate(rmsnorm(name))
    op, _ = registry.for_definition(definition)
    found = []
    for entry in planned:
        case = Case(**entry["case"])  # type: ignore[arg-type] # as planned
        value = make_inputs(op, definition, case, device=torch.device("cpu"))["hidden_states"]
        assert isinstance(value, torch.Tensor)
        found.append(round(float(value.double().sum()), 3))
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, planned: list[dict[str, object]]) -> dict[str, Rows]:
    root = tmp_path_factory.mktemp("dataset")
    sizes = sorted({entry["case"]["axes"]["batch_size"] for entry in planned})  # type: ignore[index] # as planned
    for name, body in CONDITIONS.items():
        head = f"{COUNTED}SIZES = {sizes}\nSUMS = {sums(name, planned)}\n"
        write(root, rmsnorm(name, reference(body, head=head)))
    write(root, rmsnorm("good"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "check", lambda *_: [])
        return Run(root, tmp_path_factory.mktemp("results"), selection=SELECTION, limits=LIMITS).verify()


@pytest.mark.parametrize("name", CONDITIONS)
def test_right_under_a_condition_is_wrong(name: str, rows: dict[str, Rows]) -> None:
    assert verdicts(rows[name]) & {("fail", reason) for reason in ("numerics", "determinism", "nan", "infinity")}


def test_a_right_one_passes_hidden_cases_too(rows: dict[str, Rows]) -> None:
    assert verdicts(rows["good"]) == {("pass", None)}
    hidden = {f"hidden-{name}" for name in ("0", "1", "nan", "inf", "large", "small")}
    assert hidden <= {row["case"] for row in rows["good"]}
    repeat = next(row for row in rows["good"] if row["case"] == "hidden-0")["repeat"]
    assert "--hidden-seed 123456789" in repeat
    assert "--seed 0" in repeat


def test_sizes_reach_what_fits_and_lie_at_powers_of_two() -> None:
    definition = Definition.model_validate(rmsnorm("alpha"))
    op, _ = registry.for_definition(definition)
    [base, *_] = op.cases(definition, sizes=("small",), seed=0)
    found = [{case.id: case for case in hidden_cases(definition, op, base, number)} for number in range(40)]
    assert {cases["hidden-1"].axes["batch_size"] for cases in found} == {8191, 8192, 8193}
    others = [cases["hidden-2"].axes["batch_size"] for cases in found if "hidden-2" in cases]
    assert len({*others}) > 15
    assert HIDDEN in others  # as many as columns
    several = {case.axes["batch_size"] for cases in found for name, case in cases.items() if "large" in name}
    assert len(several) > 20
    assert 20 < min(several) < 30
    assert 100 < max(several) <= 128
    assert all(cases["hidden-large"].axes == cases["hidden-small"].axes for cases in found)
    assert found[7] == {case.id: case for case in hidden_cases(definition, op, base, 7)}


def test_keys_of_one_query_are_as_many() -> None:
    definition = next(one for one in ops.definitions("single_decode") if "kv_len" in one.var_axes)
    op, _ = registry.for_definition(definition)
    [base, *_] = op.cases(definition, sizes=("small",), seed=0)
    found = [case for number in range(4) for case in hidden_cases(definition, op, base, number)]
    assert {case.axes["kv_len"] for case in found if case.id == "hidden-1"} <= {8191, 8192, 8193}
    assert all(case.axes["kv_len"] > 20 for case in found if case.id == "hidden-large")


def test_query_heads_are_a_multiple_of_key_heads_as_kernels_demand() -> None:
    definition = ops.load("rope", "rope_with_cos_sin_cache_neox_style_d64_rd32")
    op, _ = registry.for_definition(definition)
    [base, *_] = op.cases(definition, sizes=("small",), seed=0)
    found = [case.axes for number in range(4) for case in hidden_cases(definition, op, base, number)]
    heads = {(axes["num_qo_heads"], axes["num_kv_heads"]) for axes in found}
    assert not [(of_q, of_k) for of_q, of_k in heads if of_q % of_k]
    assert len(heads) > 8


def test_the_number_is_drawn_once_for_a_results_folder(tmp_path: Path) -> None:
    drawn = hidden_seed(tmp_path)
    assert hidden_seed(tmp_path) == drawn
    (tmp_path / "hidden_seed.txt").unlink()
    assert hidden_seed(tmp_path) != drawn


def test_a_changed_blob_is_another_key(tmp_path: Path) -> None:
    root = tmp_path / "dataset"
    write(root, rmsnorm("alpha"))
    (root / "blob").mkdir()
    inputs = {"hidden_states": {"type": "random"}}
    inputs["weight"] = {"type": "safetensors", "path": "./blob/w.safetensors", "tensor_key": "weight"}
    line = {"uuid": "one", "axes": {"batch_size": 3}, "inputs": inputs}
    write_workloads(root, "alpha", [line])
    selection = PlanSelection(sizes=("small",), workloads=True, cases=("workload-one",))
    run = Run(root, tmp_path / "results", selection=selection, limits=LIMITS)
    digests = []
    for value in (1.0, 2.0):
        save_file({"weight": torch.full((HIDDEN,), value, dtype=torch.bfloat16)}, root / "blob" / "w.safetensors")
        (row,) = run.verify()["alpha"]
        assert row["verdict"] == Verdict.PASS
        digests.append(row["digests"]["inputs"])
    assert digests[0] != digests[1]


def test_no_oracle_is_no_pass() -> None:
    of = {"definition": "mystery", "op_type": "mystery"}
    rows = [row(**of, output="y", verdict="skip", reason="no_oracle"), row(**of, output="*")]
    summary = summarise(rows, Known())
    assert not summary["verified"]
    assert told(summary, "verdict") == {"mystery": "no_oracle"}
    text = table(summary)
    assert "no oracle" in text
    assert "NOT VERIFIED: 1 definition, 1 not verified: no oracle" in text
    assert "against the float64 oracle alone" not in text
    entry = {"definitions": ["mystery"], "cases": ["small-0"], "outputs": ["y"], "verdict": "skip"}
    why = "there is no oracle for it, and we know that"
    known = Known.model_validate({"findings": [entry | {"reason": "no_oracle", "why": why}]})
    assert summarise(rows, known)["verified"]


def test_a_known_fault_may_show_in_a_hidden_case_or_not() -> None:
    entry = {"definitions": ["a"], "cases": ["small-0"], "outputs": ["y"], "verdict": "fail", "reason": "numerics"}
    known = Known.model_validate({"findings": [entry | {"why": "the reference's fault: see the findings"}]})
    of = {"definition": "a", "op_type": "rope", "output": "y"}
    fault = {"verdict": "fail", "reason": "numerics"}
    for there in (fault, {"verdict": "pass", "reason": None}):
        rows = [row(**of, **fault), row(**of, case="hidden-0", **there)]
        assert summarise(rows, known)["verified"]
    other = row(**of, case="hidden-0", verdict="fail", reason="nan")
    assert not summarise([row(**of, **fault), other], known)["verified"]


def test_a_hidden_case_is_published_nowhere(rows: dict[str, Rows]) -> None:
    found = implementation_verdicts(VerdictRow.model_validate(row) for row in rows["good"])
    verdict = found["good"]["reference"]
    assert verdict.passed
    assert not [case for case in verdict.cases if case.startswith("hidden")]
