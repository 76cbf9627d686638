"""Of every form: inputs that matter, outputs that are judged, elements at boundaries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import op_support as ops
import planted_attention as planted
import pytest
import torch
from definitions import rmsnorm, write
from pipeline import Rows, Run, summarise, told, verdicts

from traceproof.dataset.definition import Definition
from traceproof.dataset.hints import Role, role_of
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Value
from traceproof.ops.cases import BEFALLEN, OTHER_SCALARS, Case, boundaries
from traceproof.reasons import Verdict
from traceproof.run.case import CPU, SolvedCase, make_inputs, other, solve
from traceproof.run.judging import rulings
from traceproof.run.known import Known
from traceproof.run.plan import PlanSelection
from traceproof.run.untrusted import CaseResult
from traceproof.sandbox import Limits
from variants import variants_of

OWN = ops.OWN
FORMS = [*OWN, *planted.ALL]
ROOT = Path(__file__).resolve().parents[1]
LIMITS = 100.0  # by how many of them the answer has to move
HEAVY = 4 << 30  # bytes: cases that need more are looked at no more


def others(value: Value, drawn: Value) -> Iterator[Value]:
    """Other values of an input: of another seed, moved ends of sequences, neighbours, zeros; halves of numbers."""
    if not isinstance(value, torch.Tensor):
        yield other(value)
        if value in (False, True):
            yield not value
        if isinstance(value, float):
            yield 8 * value
        return
    if isinstance(drawn, torch.Tensor) and drawn.shape == value.shape:
        yield drawn
    if value.dtype in {torch.int32, torch.int64}:
        if value.dim() == 1 and len(value) > 2:
            yield torch.cat([value[:1], torch.maximum(value[1:-1] - 1, value[:-2]), value[-1:]])
        yield (value - 1).clamp_min(1)
    elif value.dtype.itemsize > 1:
        yield torch.zeros_like(value)
    if value.dim() and value.dtype.itemsize > 1:
        yield value.roll(1, 0)


def distance(subject: SolvedCase, outputs: Tensors) -> float:
    """By how many limits outputs are off; without end where they are wrong by no number."""
    found = 0.0
    for _, ruling in rulings(subject, CaseResult(outputs=outputs), tolerance=None, reference=True):
        if ruling.verdict is not Verdict.PASS:
            found = max(found, (ruling.details.get("gate") or {}).get("margin") or torch.inf)
    return found


def shown(definition: Definition) -> tuple[dict[str, str], set[str]]:
    """The case in which each input by itself moves the answer far, by input; and the outputs that are judged."""
    op = registry.get(definition.op_type).of_form(definition)
    right, seen, judged = variants_of(definition.op_type)[0], dict[str, str](), set[str]()
    for case in ops.cases(definition, "small", "medium"):
        if seen.keys() >= definition.inputs.keys() and judged >= op.judged(definition).keys():
            break
        if op.memory(definition, case) > HEAVY:
            continue
        subject, drawn = solve(definition, case), ops.inputs_of(definition, replace(case, seed=1))
        judged |= subject.oracle.keys() & op.judged(definition).keys() & op.comparisons(definition).keys()
        for name in definition.inputs.keys() - seen.keys():
            for value in others(subject.inputs[name], drawn[name]):
                torch.default_generator.manual_seed(1)
                try:
                    outputs = right.make(replace(subject, inputs={**subject.inputs, name: value}))
                    far = outputs is not None and distance(subject, outputs) > LIMITS
                except (RuntimeError, IndexError, ValueError, AssertionError, TypeError, KeyError):
                    continue
                if far:
                    seen[name] = case.id
                    break
    return seen, judged


def row(definition: Definition, seen: Mapping[str, str], judged: set[str]) -> str:
    """A row of the table in docs/inputs.md."""
    by_case: dict[str, list[str]] = {}
    unread = registry.get(definition.op_type).of_form(definition).unread(definition)
    for name in definition.inputs:
        by_case.setdefault(seen.get(name, f"never: {unread.get(name)}"), []).append(f"`{name}`")
    told = "; ".join(f"{', '.join(names)} ({case})" for case, names in by_case.items())
    outputs = ", ".join(f"`{name}`" for name in sorted(judged))
    return f"| {definition.op_type} | {definition.name} | {told} | {outputs} |"


@pytest.mark.parametrize("definition", FORMS, ids=lambda definition: definition.name)
def test_every_input_matters_and_every_output_is_judged(definition: Definition) -> None:
    seen, judged = shown(definition)
    op = registry.get(definition.op_type).of_form(definition)
    assert definition.inputs.keys() - seen.keys() == op.unread(definition).keys()
    assert judged == op.judged(definition).keys()
    assert row(definition, seen, judged) in (ROOT / "docs" / "inputs.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("definition", FORMS, ids=lambda definition: definition.name)
def test_right_ways_pass_with_other_scalars(definition: Definition) -> None:
    op = registry.get(definition.op_type).of_form(definition)
    base = op.of_size(definition, ops.case_named(definition, "small-0"), 17, long=True)
    subject = solve(definition, replace(base, params={**base.params, OTHER_SCALARS: True}))
    assert not distance(subject, variants_of(definition.op_type)[0].make(subject) or {})


def test_a_flag_is_turned_in_hidden_cases_and_keeps_its_type() -> None:
    definition = ops.load("rope", "rope_cos_sin_cache_d32")
    op, case = registry.get("rope").of_form(definition), next(iter(ops.cases(definition, "small")))
    several = [replace(case, params={**case.params, **more}) for more in ({}, {OTHER_SCALARS: True})]
    flags = [make_inputs(op, definition, one, device=CPU)["is_neox"] for one in several]
    assert [(type(flag), flag) for flag in flags] == [(int, 1), (int, 0)]


def test_every_op_type_is_among_them() -> None:
    assert {definition.op_type for definition in FORMS} == set(registry.known())


SANDBOX = Limits(seconds=300.0, memory_bytes=1 << 30)
CASES = ("small-0", "edge-buffer", "hidden-0", "hidden-1")
SELECTION = PlanSelection(sizes=("small",), cases=CASES, hidden_seed=1)
WRITE = "intermediate_states_buffer[slot, t] = final_state[slot]"
BUFFERS = {
    "kept": WRITE,
    "unwritten": "pass",
    "rubbish": "intermediate_states_buffer[slot, t] = 7.0",
    "of_the_row": WRITE.replace("[slot, t]", "[row, t]"),
    "before_the_token": "intermediate_states_buffer[slot, t] = initial_state[slot]",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    """Rows of a reference that keeps states in all of these ways, and of one that leaves an output out."""
    root = tmp_path_factory.mktemp("dataset")
    mtp = json.loads((ops.ROOT / "gdn" / "gdn_mtp_qk2_v4_d32_k_last.json").read_text(encoding="utf-8"))
    assert mtp["reference"].count(WRITE) == 1
    for name, body in BUFFERS.items():
        write(root, mtp | {"name": name, "reference": mtp["reference"].replace(WRITE, body)})
    write(root, optional("left_out", "return (hidden_states.float() * scale * weight).to(hidden_states.dtype),"))
    return Run(root, tmp_path_factory.mktemp("results"), selection=SELECTION, limits=SANDBOX).verify()


def optional(name: str, returned: str) -> dict[str, Any]:
    """A fused addition and norm, whose sum need not be returned."""
    found = rmsnorm(name)
    hidden = found["inputs"]["hidden_states"]
    found["inputs"] = {"hidden_states": hidden, "residual": dict(hidden), "weight": found["inputs"]["weight"]}
    output = found["outputs"]["output"]
    found["outputs"] = {"output": output, "residual_out": output | {"optional": True}}
    found["reference"] = f"""import torch

EPS = 1e-6

@torch.no_grad()
def run(hidden_states, residual, weight):
    hidden_states = (hidden_states.float() + residual.float()).to(hidden_states.dtype)
    scale = torch.rsqrt(hidden_states.float().pow(2).mean(-1, keepdim=True) + EPS)
    {returned}
"""
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BUFFERS)
def test_what_a_definition_writes_to_is_judged(name: str, rows: dict[str, Rows]) -> None:
    found = [row for row in rows[name] if row["output"] == "intermediate_states_buffer"]
    assert {row["case"] for row in found} >= {"edge-buffer", "hidden-1"}
    assert ("fail", "numerics") in verdicts(found) or name == "kept"
    assert verdicts(found) == {("pass", None)} or name != "kept"


@pytest.mark.slow
def test_an_output_that_is_left_out_is_not_judged_and_the_definition_not_proved(rows: dict[str, Rows]) -> None:
    found = [row for row in rows["left_out"] if row["output"] == "residual_out"]
    assert verdicts(found) == {("skip", "unjudged")}
    assert {row["case"] for row in found} >= {"small-0", "hidden-0"}
    summary = summarise(rows["left_out"], Known())
    assert not summary["verified"]
    assert told(summary, "conclusion") == {"left_out": "unverified"}
    assert told(summary, "grade") == {"left_out": None}


def test_an_input_that_an_output_stands_for_is_judged_once() -> None:
    definition = ops.load("page_append", "append_paged_kv_cache_kv2_d64_ps4")
    op = registry.get("page_append").of_form(definition)
    assert list(op.judged(definition)) == list(definition.outputs)


pytestmark = pytest.mark.usefixtures("one_thread")
# Op_types whose sums over a row no other case watches element by element.
MEANT = {
    *("rmsnorm", "layernorm", "gated_residual_rmsnorm", "gated_residual_next_rmsnorm", "rmsnorm_sigmoid_gate"),
    *("gemm", "gemm_bf16", "gemm_fp8", "quantize_fp8", "quantize_int8"),
    *("gdn", "mamba_ssu", "moe", "rope"),
}
# Op_types of which ordinary cases do: keys at ends of pages and of sequences, tokens of a vocabulary, the best of
# a few experts; widths of two halves, over which nothing is summed.
WATCHED = {
    *("gqa_paged", "gqa_ragged", "mla_paged", "mla_ragged", "dsa_paged", "single_decode", "single_prefill"),
    *("sampling", "moe_routing", "activation"),
    # Maxima over blocks of at most 128, of which any place has the largest in ordinary data.
    *("quantization", "activation_quantize", "quantize_nvfp4_smooth", "quantize_fp4", "page_append"),
    # Products of codes: an element left out is more of each output than its rounding.
    "minimax_h3_qkv_quantize_pack",
    *("gemm_nvfp4_svdquant", "linear_nvfp4_svdquant", "all_gather_rmsnorm_fp4_quantize"),
    "all_gather_gated_residual_next_rmsnorm",  # the norm that it shares with another op_type is
    "msa_proxy",  # products in float32, likewise
    "kda",  # heads lie side by side: over a row nothing is summed
}
WATCHED_FORMS = {  # likewise
    "add_rmsnorm_fp4quant_h96",
    "rope_quantize_fp8_append_h4_kv2_rope32_ps4",
    # Rows that are copied, and whose norm ordinary cases watch; a plan's output is added to what there is.
    *("interleave_gated_weights_e3_h128_m512", "moe_finalize_rmsnorm_allreduce_k2_h64_hp64"),
    *("tp_moe_finalize_rmsnorm_k4_h96_hp112", "moe_fp8_block_scale_planned_topk2_e4_h256_i256"),
}
TENSOR_SCALES = "trtllm_fp8_per_tensor_scale_moe_topk1_e16_h512_i512"  # rounds away what is left alone
READ_BY = ("positions", "pos_ids", "state_batch_indices")  # a row of a cache for each token


def boundary_cases(definition: Definition) -> list[Case]:
    op = registry.get(definition.op_type).of_form(definition)
    return list(op.boundaries(definition, seed=0))


def at_boundaries(definition: Definition) -> Iterator[SolvedCase]:
    return (solve(definition, case) for case in boundary_cases(definition))


def test_every_op_meant_has_such_a_case_and_recurrent_ones_of_keys_and_of_queries() -> None:
    found = {
        (one.op_type, name)
        for one in OWN
        for case in boundary_cases(one)
        for name in (*case.params.get(BEFALLEN, ()), "")
    }
    assert {op_type for op_type, _ in found} >= MEANT
    assert found >= {("gdn", "k"), ("gdn", "q"), ("mamba_ssu", "C"), ("mamba", "C")}


@pytest.mark.parametrize("definition", OWN, ids=lambda one: one.name)
def test_right_ways_pass_and_no_element_can_be_left_out(definition: Definition) -> None:
    for subject in at_boundaries(definition):
        for outputs in (one.make(subject) for one in variants_of(definition.op_type)):
            for name in definition.outputs if outputs is not None else ():
                ruling = subject.ruling(name, (outputs or {})[name])
                assert ruling.verdict == Verdict.PASS, (name, ruling.message)
        for data in {*subject.case.params.get(BEFALLEN, ())} - {"conv_state"}:  # whose first element goes
            value = subject.tensor(data)
            for place in boundaries(value.shape[-1]):
                less = value.float()
                less[..., place] = 0.0
                assert told_apart(subject, **{data: less.to(value.dtype)}), (data, place)


def told_apart(subject: SolvedCase, **inputs: torch.Tensor) -> bool:
    """Whether what other inputs give is refused."""
    wrong = replace(subject, inputs=subject.with_inputs(**inputs))
    outputs = variants_of(subject.definition.op_type)[0].make(wrong)
    assert outputs is not None
    return Verdict.FAIL in {subject.ruling(name, outputs[name]).verdict for name in subject.definition.outputs}


def test_boundaries_are_both_sides_of_each_tile_s_first_and_last_border() -> None:
    assert boundaries(100) == [0, 15, 16, 31, 32, 63, 64, 95, 96, 99]
    wide = boundaries(4096)
    assert (wide[:2], wide[-5:]) == ([0, 15], [4063, 4064, 4079, 4080, 4095])


@pytest.mark.parametrize(
    "definition",
    [one for one in OWN if not one.inputs.keys().isdisjoint(READ_BY) and boundary_cases(one)],
    ids=lambda one: one.name,
)
def test_no_row_of_a_cache_at_a_border_can_be_taken_for_the_one_beside_it(definition: Definition) -> None:
    [subject] = at_boundaries(definition)
    [name] = definition.inputs.keys() & {*READ_BY}
    rows = subject.tensor(name)
    for place in boundaries(4097 if "cos_sin_cache" in definition.inputs else len(subject.tensor("state"))):
        beside = torch.where(rows == place, (rows - 1).abs(), rows)
        assert told_apart(subject, **{name: beside}), place


@pytest.mark.parametrize("definition", [one for one in OWN if one.op_type == "moe"], ids=lambda one: one.name)
def test_no_channel_of_an_expert_at_an_end_can_be_left_out(definition: Definition) -> None:
    for subject in (solve(definition, case) for case in boundary_cases(definition) if "inner" in case.id):
        weights = subject.tensor("gemm2_weights")
        local = subject.tensor("gemm1_weights").float().abs().sum(-1)  # [experts, 2 * channels]
        for expert, end in ((0, weights.shape[-1] - 1), (len(local) - 1, 0)):
            assert (local[expert, : weights.shape[-1]] != 0).nonzero().flatten().tolist() == [end]
            less = weights.clone()
            less.view(torch.uint8 if less.dtype.itemsize == 1 else less.dtype)[expert, :, end] = 0
            assert told_apart(subject, gemm2_weights=less), expert


@pytest.mark.parametrize("definition", OWN, ids=lambda one: one.name)
def test_every_op_that_sums_over_an_axis_watches_its_ends(definition: Definition) -> None:
    kept = {axis for spec in definition.outputs.values() for axis in spec.shape or ()}
    summed = {
        axis
        for spec in definition.inputs.values()
        for axis in (spec.shape or ())[-1:]
        if definition.const_axes.get(axis, 0) >= 16 and axis not in kept and "float8" not in spec.dtype
        if spec.dtype not in {"uint8", "int8"}  # codes
    }
    known = definition.op_type in WATCHED or definition.name in WATCHED_FORMS | {TENSOR_SCALES}
    watched = known or bool(boundary_cases(definition))
    assert watched or not summed, (definition.op_type, summed)


RULED_OUT = {
    Role.OFFSETS: "a negative length in ",
    Role.LENGTHS: "a negative length in ",
    Role.INDICES: "a place that is not there in ",
}


@pytest.mark.parametrize("definition", OWN, ids=lambda one: one.name)
def test_every_form_says_which_inputs_it_rules_out(definition: Definition) -> None:
    op, _ = registry.for_definition(definition)
    cases = [one for one in op.cases(definition, sizes=("small",), seed=0) if one.size == "small"]
    inputs = make_inputs(op, definition, cases[-1], device=CPU)
    found = dict(op.errors(definition, inputs))
    assert found or {one.dtype for one in inputs.values() if isinstance(one, torch.Tensor)} == {torch.uint8}
    for what, changed in found.items():
        names = [name for name, value in inputs.items() if changed[name] is not value]
        assert names
        assert all(name in what for name in names)
    whole = {
        name
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.dtype in {torch.int32, torch.int64} and value.numel() > 1
    }
    told = {f"{RULED_OUT[role]}{name}" for name in whole if (role := role_of(name)) in RULED_OUT}
    assert told <= found.keys()
    assert "top_k" not in whole or "more than there are in top_k" in found
    uneven = [what for what in found if what.endswith("no multiple of 16")]
    assert len(uneven) == bool(op.of_form(definition).uneven)
    for what in uneven:  # of any other head size the oracle says what is right
        assert op.oracle(definition, found[what]).keys() >= definition.outputs.keys()
