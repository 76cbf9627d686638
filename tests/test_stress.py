"""Cases of size `stress` show what no other size does, and right answers pass them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from definitions import rmsnorm
from pipeline import plans

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
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve
from traceproof.run.plan import PlanSelection
from traceproof.run.schema import OpTypePlan
from traceproof.run.trusted import Implementation
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
