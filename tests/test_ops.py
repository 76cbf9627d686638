"""Every op and each of its forms: inputs fit, references and equivalent variants pass, every mutant fails."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import op_support as ops
import planted_attention as planted
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.judge.arbitration import OutputMutant, generic_mutants
from traceproof.ops import lookup, registry
from traceproof.ops.adapter import resolve
from traceproof.ops.attention import is_causal
from traceproof.ops.base import TORCH_DTYPES, Unsupported, Values, rounded
from traceproof.ops.cases import BEFALLEN, LOSSLESS, UNUSUAL, Case
from traceproof.ops.compare import Backward, Close
from traceproof.reasons import Skip, Verdict
from traceproof.run import shadow
from traceproof.run.case import SolvedCase, fingerprints, make_inputs, solve
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.run.trusted import Implementation
from traceproof.stacks import STACK_OF, STACKS
from variants import variants_of

pytestmark = pytest.mark.usefixtures("one_thread")
OWN, FORMS = ops.OWN, planted.ALL
SIZES = ("small", "medium", "large")
HEAVY = frozenset({"moe", "mla_ragged", "gqa_paged"})  # op_types whose definitions here take seconds
HARMLESS = {  # mutants that give the right bits
    "quantize_fp8_h96_g3": {"scaled by 1.02"},  # rounded away by three bits of mantissa
    "single_prefill_window_sinks_h4_kv1_d32": {"no maximum subtracted"},  # logits are capped
}
FP8 = {"scaled by 1.02", "last output: scaled by 1.02"}  # likewise
HARMLESS |= {
    "linear_nvfp4_svdquant_n96_k128_r16": {"scaled by 1.02"},  # less than what bfloat16 before codes loses
    "top_k_mask_logits_v256": {"-inf against finite"},  # the middle one is -inf
    "add_rmsnorm_fp4quant_h96": {"scaled by 1.02"},
    "mla_rope_quantize_fp8_h4_rope32": FP8,
    "rope_quantize_fp8_append_h4_kv2_rope32_ps4": FP8,
    "mxfp8_quantize_k96": FP8,
    "minimax_h3_qkv_quantize_pack_mxfp8_p2_h4_d64": FP8,
    "mxfp8_grouped_quantize_k96": FP8,
    "concat_mla_kv_fp8_h3_kv160_rope16": FP8,
    "nvfp4_kv_quantize_k96": FP8,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_kv2_d64_ps4": FP8,
    "nvfp4_quantize_append_paged_mla_kv_cache_ckv512_kpe64_ps4": FP8,
    "silu_and_mul_mxfp8_backward_both_k128": FP8,
    "silu_and_mul_mxfp8_forward_col_k256": FP8,
    "silu_and_mul_scaled_nvfp4_experts_quantize_k64": FP8,
    "interleave_gated_weights_e3_h128_m512": {"scaled by 1.02"},  # likewise
}
# Whose cases list lengths, or have 128 rows at least: they have hidden cases of their own sizes alone.
UNSIZED = frozenset(
    {
        *("dsa_paged", "silu_and_mul_mxfp8_backward_both_k128", "silu_and_mul_mxfp8_forward_col_k256"),
        "interleave_gated_weights_e3_h128_m512",
    }
)
HIDING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": lambda one: one.nan_to_num(0.0),
    "inf": lambda one: one.nan_to_num(0.0, 0.0),
    "large": lambda one: one.clamp(-8, 8),
    "small": lambda one: one.where(one.abs() > 2.0**-14, 0.0),
}
SOLVED: dict[str, SolvedCase] = {}
ROOM = 700 << 20  # leaves out nothing but the large cases of attention


def each(*definitions: Definition) -> pytest.MarkDecorator:
    """A parameter that is each of some definitions in turn."""
    slow = {definition.name for definition in OWN if definition.op_type in HEAVY}
    return pytest.mark.parametrize(
        "definition",
        [
            pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.name in slow else [])
            for one in definitions
        ],
        indirect=True,
        scope="module",
    )


@pytest.fixture(scope="module")
def definition(request: pytest.FixtureRequest) -> Iterator[Definition]:
    """All tests of a definition follow one another, so that its cases are solved once."""
    found: Definition = request.param
    yield found
    SOLVED.clear()


def solved(definition: Definition, case: Case) -> SolvedCase:
    """The solved case, kept until the tests of the definition are done: 50 MB at most."""
    if case.id not in SOLVED:
        SOLVED[case.id] = solve(definition, case)
    return SOLVED[case.id]


def cases(definition: Definition, *sizes: str) -> list[Case]:
    op = registry.get(definition.op_type).of_form(definition)
    return [case for case in ops.cases(definition, *sizes) if op.memory(definition, case) < ROOM]


def copied(subject: SolvedCase) -> dict[str, Any]:
    return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in subject.inputs.items()}


def refused(
    subject: SolvedCase, outputs: Mapping[str, torch.Tensor], *, reference: bool = False
) -> dict[str, str]:
    """What the judge says of the outputs that it does not pass."""
    rulings = {
        name: subject.ruling(name, outputs.get(name), reference=reference)
        for name in dict.fromkeys((*subject.definition.outputs, *outputs))
    }
    return {name: ruling.message for name, ruling in rulings.items() if ruling.verdict != Verdict.PASS}


@each(*OWN, *FORMS)
def test_inputs_fit_the_schema(definition: Definition) -> None:
    found = cases(definition, *SIZES)
    assert len({case.id for case in found}) == len(found)
    for case in found:
        assert set(definition.var_axes) <= set(case.axes) <= set(definition.axes)
        if case.id != "edge-empty":
            assert registry.get(definition.op_type).of_form(definition).memory(definition, case) > 0
        # Experts and long sequences take long to draw thrice, and larger cases are drawn as small ones are.
        again = case.size == "small" or not (case.size in SIZES or definition.op_type in HEAVY)
        ops.assert_inputs_fit(solved(definition, case), again=again)


class OtherTiesAndSums(shadow.PlainMode):  # type: ignore[no-untyped-call]
    """Sorts that promise no order of equal elements give the last one first; sums begin at the other end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        del types
        given = kwargs or {}
        if func in shadow.BACKWARDS:
            return shadow.BACKWARDS[func](func, *args, **given)
        return shadow.WITH_OTHER_TIES.get(func, func)(*args, **given)


def test_no_input_follows_from_the_order_of_ties_or_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sorts equal numbers, and sums, as it likes. Uniform numbers are one of nine, so many are equal."""
    fine = Draw.uniform
    monkeypatch.setattr(Draw, "uniform", lambda *names, **ends: fine(*names, **ends).mul_(8).round_().div_(8))
    differ = []
    for one in (*OWN, *FORMS):
        op = registry.get(one.op_type).of_form(one)
        small = next(case for case in ops.cases(one, "small") if case.id == "small-1")
        exact = op.lossless_case(one, small)
        for case in (small, replace(exact, params={**exact.params, UNUSUAL: LOSSLESS})):
            plain = fingerprints(make_inputs(op, one, case, device=ops.CPU))
            with OtherTiesAndSums():  # type: ignore[no-untyped-call]
                turned = fingerprints(make_inputs(op, one, case, device=ops.CPU))
            differ += [(one.name, case.id, name) for name in plain if plain[name] != turned[name]]
    assert not differ


MAKERS = frozenset({"tensor", "arange", "zeros", "ones", "empty", "full", "eye", "linspace"})


@each(*OWN)
def test_a_reference_names_the_device_of_each_tensor_that_it_makes(definition: Definition) -> None:
    calls = [node for node in ast.walk(ast.parse(definition.reference)) if isinstance(node, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func) in {f"torch.{maker}" for maker in MAKERS}]
    assert not [ast.unparse(one) for one in made if "device" not in {given.arg for given in one.keywords}]


@each(*OWN)
def test_the_reference_passes(definition: Definition) -> None:
    for case in cases(definition, *SIZES):
        subject = solved(definition, case)
        torch.default_generator.manual_seed(3)  # `torch.manual_seed` formats the stack for each kind of GPU
        assert not refused(subject, ops.reference_outputs(subject), reference=True), case.id


@each(*OWN, *FORMS)
def test_what_pytorch_s_own_functions_give_passes(definition: Definition) -> None:
    truth = Implementation("torch")
    if (lacking := truth.unavailable(definition)) is not None:
        assert lacking.reason is Skip.NO_ADAPTER
        return
    for case in cases(definition, "small"):
        subject = solved(definition, case)
        assert not refused(subject, truth.run(definition, copied(subject))), case.id


@each(*OWN, *FORMS)
@pytest.mark.parametrize("long", [False, True], ids=["many", "long"])
def test_a_case_of_another_size_fits(definition: Definition, *, long: bool) -> None:
    op = registry.get(definition.op_type).of_form(definition)
    base = next(case for case in ops.cases(definition, "small") if case.size == "small")
    case = op.of_size(definition, base, 33, long=long)
    if UNSIZED & {definition.op_type, definition.name}:
        assert case == base
        return
    assert case != base
    subject = solve(definition, case)
    ops.assert_inputs_fit(subject, again=long)
    torch.default_generator.manual_seed(3)
    if definition not in FORMS:
        assert not refused(subject, ops.reference_outputs(subject), reference=True)


@each(*OWN)
def test_unusual_values_spread_as_in_the_reference(definition: Definition) -> None:
    op = registry.get(definition.op_type).of_form(definition)
    base = op.of_size(definition, ops.case_named(definition, "small-0"), 5, long=False)
    plain = ops.inputs_of(definition, base)
    for value, names in op.unusual(definition).items():
        if not names:
            continue
        params = {**base.params, UNUSUAL: value, BEFALLEN: names}
        subject = solve(definition, replace(base, params=params))
        for name in names:
            given, before = subject.inputs[name], plain[name]
            if not isinstance(given, torch.Tensor) or not isinstance(before, torch.Tensor):
                continue
            changed = ~torch.isclose(given, before, rtol=0, atol=0)
            most = min(2, given.numel()) if value in {"nan", "inf"} else int((before != 0).sum())
            assert 0 < changed.sum() <= most
            assert value == "small" or changed.sum() == most
        for reference, outputs in (
            (True, ops.reference_outputs(subject)),
            *((False, variant.make(subject)) for variant in variants_of(definition.op_type)),
        ):
            assert outputs is None or not refused(subject, outputs, reference=reference), value
        seen = {
            name: HIDING[value](one) for name in names if isinstance(one := subject.inputs[name], torch.Tensor)
        }
        hidden = rounded(definition, subject.op.oracle(definition, {**subject.inputs, **seen}))
        assert refused(subject, hidden, reference=True), value


# NaN in one of these is NaN in all rows, whatever the others hold.
INNER = {"alpha", "beta", "post_weight", "next_weight", "A_scale", "B_scale"}


@each(*OWN, *FORMS)
def test_nan_and_infinity_show_in_what_depends_on_them(definition: Definition) -> None:
    ways, shown, names = variants_of(definition.op_type), set[str](), set[str]()
    for seed in (7, 8):  # where a table is picked from, a row that holds NaN may not be
        selection = PlanSelection(sizes=("small",), hidden_seed=seed)
        for case in (one.case for one in planned_alone(definition, selection).cases if names - shown or not names):
            subject = solve(definition, case) if case.seen else None
            if subject is None:
                continue
            names |= {*case.seen}
            right = [way.make(subject) for way in ways]
            assert not [outputs for outputs in right if outputs is not None and refused(subject, outputs)]
            if definition not in FORMS:
                assert not refused(subject, ops.reference_outputs(subject), reference=True)
            for name in {*case.seen} - shown:
                value = subject.tensor(name)
                inputs = subject.with_inputs(**{name: torch.where(value.isfinite(), value, 0.5)})
                outputs = ways[0].make(replace(subject, inputs=inputs))
                shown |= {name} if outputs is None or refused(subject, outputs, reference=True) else set()
    apart = registry.get(definition.op_type).of_form(definition).row_axis(definition) is not None
    few = definition.op_type == "dsa_paged"  # its cases do not grow
    # Where rows are not apart, one input's may be in all that depends on another one.
    assert names - shown <= INNER if apart else few or 2 * len(shown) >= len(names)


@each(*OWN, *FORMS)
def test_equivalent_variants_pass_and_mutants_fail(definition: Definition) -> None:
    """Each variant in every case, each mutant in one case at least of those that it applies to."""
    variants = variants_of(definition.op_type)
    own = registry.mutants_of(definition)
    waiting = [*generic_mutants(variants[0]), *own]
    names = [answer.name for answer in (*variants, *waiting)]
    assert len(set(names)) == len(names)
    applying: set[str] = set()
    dtypes = {name: TORCH_DTYPES[spec.dtype] for name, spec in definition.outputs.items()}
    for case in cases(definition, "small", "medium"):
        subject = solved(definition, case)
        right = [variant.make(subject) for variant in variants]
        for variant, outputs in zip(variants, right, strict=True):
            assert outputs is None or not refused(subject, outputs), f"{case.id}: {variant.name}"
        given = {
            mutant: right[0] and mutant.change(right[0])
            if isinstance(mutant, OutputMutant)
            else mutant.make(subject)
            for mutant in waiting
        }
        for mutant, outputs in given.items():
            if outputs is not None and mutant in own:  # it is wrong by its numbers, not by its form
                assert {name: outputs[name].dtype for name in dtypes} == dtypes, mutant.name
        applying |= {mutant.name for mutant, outputs in given.items() if outputs is not None}
        waiting = [mutant for mutant, outputs in given.items() if outputs is None or not refused(subject, outputs)]
    assert len(applying) >= 8
    assert applying & {mutant.name for mutant in waiting} == HARMLESS.get(definition.name, set())


NARROW = (torch.bfloat16, torch.float16)
# Outputs of too few heads, rows or different values to say what is luck, of operands of fewer bits, or copies.
FEW = {
    "fused_topk_deepseek_e64_k4": {"topk_values_out"},
    "trtllm_gen_routing_e24_k3_t4": {"topk_weights"},
    "pcie_ipc_reduce_scatter_tp4_h48": {"output"},
    "minimax_h3_pre_attention_h96_p2_d32": {"out_out"},
    "fused_kda_decode_h2_d16": {"output"},
    "packed_fused_kda_decode_h2_d16": {"output"},
    "fmha_v2_prefill_fp8_h2_d32": {"output"},
    "xqa_mla_h4_ckv32_qk48_ps8": {"output"},
    "kda_recurrent_q2_v4_d32": {"output"},
    "ssd_combined_varlen_h4_d16_g2_s32": {"out_out", "final_states"},
    "ssd_combined_batched_h4_d16_g2_s32": {"out_out"},
    "single_decode_h4_kv2_d64": {"output"},
    "nvfp4_kv_dequantize_paged_h3_dk64_dv96_ps4": {"output_k_out", "output_v_out"},
    "nvfp4_kv_dequantize_paged_hnd_h3_dk64_dv96_ps4": {"output_k_out"},
}


def cut_off(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The next value toward zero in place of the nearest."""
    near = exact.to(dtype)
    beyond = near.double().abs() > exact.double().abs()
    return torch.where(beyond, (near.view(torch.int16) - 1).view(dtype), near)


@each(*OWN)
def test_an_output_is_refused_that_is_cut_off_or_a_little_too_large(definition: Definition) -> None:
    """Of each 16-bit output that is held to one rounding, in one case at least."""
    op = registry.get(definition.op_type).of_form(definition)
    kinds, wrong = (
        op.comparisons(definition),
        {"x 1.004": lambda exact, dtype: (exact * 1.004).to(dtype), "cut off": cut_off},
    )
    narrow = {
        name: TORCH_DTYPES[spec.dtype]
        for name, spec in definition.outputs.items()
        if isinstance(kinds[name], Close | Backward) and TORCH_DTYPES[spec.dtype] in NARROW
    }
    waiting = {(name, way) for name in narrow for way in wrong}
    for case in cases(definition, *SIZES):
        subject = solved(definition, case)
        for name, way in sorted(waiting):
            exact = subject.oracle[name]
            if exact.is_floating_point() and not torch.equal(exact, exact.to(narrow[name]).to(exact.dtype)):
                ruling = subject.ruling(name, wrong[way](exact, narrow[name]))
                waiting -= {(name, way)} if ruling.verdict != Verdict.PASS else set()
    assert {name for name, _ in waiting} == FEW.get(definition.name, set())


Change = Callable[[dict[str, Any]], object]
VAR = {"type": "var"}


def less(kind: str, name: str) -> Change:
    """A definition without one of its inputs or outputs."""
    return lambda entry: entry[kind].pop(name)


def given(kind: str, name: str, **fields: object) -> Change:
    """A definition with another axis, input or output."""
    return lambda entry: entry[kind].update({name: entry[kind].get(name, {}) | fields})


def sized(name: str) -> Change:
    """A definition with a var axis in place of a const one."""
    return lambda entry: entry["axes"].update({name: VAR})


def computed_eps(entry: dict[str, Any]) -> None:
    entry["reference"] = entry["reference"].replace("EPS = 1e-5", "EPS = 2e-5 - 1e-5")
    entry["description"] = "A norm."


def heads_first(entry: dict[str, Any]) -> None:
    for name in ("k_cache", "v_cache"):
        pages, tokens, heads, width = entry["inputs"][name]["shape"]
        entry["inputs"][name]["shape"] = [pages, heads, tokens, width]


# Near to a known form: what is changed, and what the refusal says.
UNKNOWN: dict[str, tuple[tuple[Change, str], ...]] = {
    "gdn_decode_qk2_v4_d32_k_last": (
        (less("inputs", "A_log"), "inputs lack ['A_log']"),
        (given("inputs", "gate", shape=None, dtype="float32"), "have unknown ['gate']"),
        (given("axes", "num_v_heads", value=3), "num_v_heads % num_q_heads == 0"),
        (given("axes", "num_k_heads", value=3), "num_v_heads % num_k_heads == 0 does not hold"),
        (sized("head_size"), ""),
        (less("outputs", "new_state"), "outputs are ['output']"),
    ),
    "gemm_n96_k160": (
        (given("inputs", "B", shape=["K", "N"]), "B has the shape"),
        (sized("N"), ""),
        (given("inputs", "A", dtype="float8_e4m3fn"), "have no matrix product here"),
        (given("inputs", "bias", shape=["N"], dtype="float16"), "have unknown ['bias']"),
    ),
    "mamba_ssu_decode_h8_d16_s32_ng2": (
        (less("inputs", "dt_bias"), "inputs lack ['dt_bias']"),
        (given("inputs", "A", shape=["nheads"]), "A has the shape"),
        (given("axes", "ngroups", value=3), "nheads % ngroups == 0"),
        (sized("dstate"), ""),
        (less("outputs", "new_state"), "outputs are ['output']"),
    ),
    "rmsnorm_h96": (
        (computed_eps, "nobody states eps"),
        (given("inputs", "extra", shape=["hidden_size"], dtype="bfloat16"), "have unknown ['extra']"),
        (lambda entry: entry.update(outputs={"normed": entry["outputs"]["output"]}), "outputs are ['normed']"),
    ),
    "rope_with_cos_sin_cache_neox_style_d64_rd32": (
        (given("inputs", "offset", shape=None, dtype="int32"), "have unknown ['offset']"),
        (given("inputs", "cos_sin_cache", shape=["max_seq_len", "head_size", "rotary_dim"]), "cos_sin_cache has"),
        (given("axes", "rotary_dim", value=33), "rotary_dim % 2 == 0 does not hold"),
        (given("axes", "rotary_dim", value=128), "rotary_dim <= head_size does not hold"),
        (sized("head_size"), ""),
    ),
    "top_k_sampling_from_probs_v1000": (
        (given("inputs", "temperature", shape=["batch_size"], dtype="float32"), "have unknown ['temperature']"),
        (given("inputs", "top_k", shape=None), "have unknown ['top_k']"),
        (sized("vocab_size"), ""),
    ),
    "moe_fp8_block_scale_renorm_topk4_e16_h512_i256": (
        (less("inputs", "gemm2_weights_scale"), "inputs lack"),
        (less("inputs", "gemm2_weights"), "inputs lack"),
        (less("inputs", "routing_logits"), "inputs lack"),
        (given("axes", "gemm1_out_size", value=256), "not gated"),
        (given("axes", "top_k", value=99), "top_k 99 of 16 experts"),
    ),
    "moe_fp8_block_scale_ds_routing_topk4_ng4_kg2_e8_h512_i256": (
        (less("inputs", "routed_scaling_factor"), "top_k 1 only"),
    ),
    "gqa_False_16_6": (
        (given("inputs", "q", shape=["batch_size", "D"]), "q has the shape"),
        (given("inputs", "q", shape=["batch_size", "num_pages", "D"]), "output has the shape"),
        (given("inputs", "mask", shape=["batch_size"], dtype="bool"), "have unknown ['mask']"),
        (less("inputs", "kv_indptr"), "inputs lack ['kv_indptr']"),
        (given("inputs", "v_cache", shape=["num_pages", "page_size", "D", "Dv"]), "v_cache has the shape"),
        (given("inputs", "k_cache", dtype="float8_e4m3fn"), "scaled storage"),
        (given("axes", "Hkv", value=5), "Hq % Hkv == 0 does not hold: "),
        (heads_first, "before the tokens of a page"),
    ),
    "single_prefill_mask_alibi_h4_kv2_d32": (
        (given("inputs", "logits_soft_cap", shape=None, dtype="float32"), "bends the bias of ALiBi"),
    ),
    "single_prefill_window_sinks_h4_kv1_d32": (
        (given("outputs", "lse", shape=["qo_len", "num_qo_heads"], dtype="float32"), "counts the sinks"),
    ),
    "indexer": (
        (given("axes", "packed", value=136), "packed == dim + 4 does not hold"),
        (given("axes", "kv_heads", value=2), "kv_heads == 1 does not hold"),
    ),
}


@pytest.mark.parametrize(
    ("name", "change", "said"), [(name, *one) for name, changes in UNKNOWN.items() for one in changes]
)
def test_a_form_that_has_no_oracle_is_said_to_have_none(name: str, change: Change, said: str) -> None:
    entry = next(one for one in (*OWN, *FORMS) if one.name == name).as_json()
    change(entry)
    definition = Definition.model_validate(entry)
    with pytest.raises(Unsupported) as refusal:
        registry.get(definition.op_type).of_form(definition).check(definition)
    assert said in str(refusal.value)
    if "before the tokens" in said:
        assert not any(lookup.adapter(truth, definition) for truth in STACK_OF)


def test_decays_of_delta_products_are_linear_with_one_update_per_token_and_without_an_axis_of_updates() -> None:
    entry = ops.load("gdp", "gdp_prefill_n2_qk2_v4_d32").as_json()
    del entry["axes"]["num_householder"], entry["axes"]["updates"]
    for name in ("k", "v", "beta"):
        entry["inputs"][name]["shape"][0] = "tokens"
    entry["reference"] = entry["reference"].replace("(2 * token, 2 * token + 1)", "(token,)")
    definition = Definition.model_validate(entry)
    for case in ops.cases(definition, "small"):
        values = ops.inputs_of(definition, case)
        rulings = ops.judged(definition, case, ops.reference(definition, values), ops.truth(definition, values))
        assert {name: ruling.verdict for name, ruling in rulings.items()} == dict.fromkeys(rulings, Verdict.PASS)


@pytest.mark.parametrize("op_type", ["gqa_paged", "gqa_ragged", "mla_paged", "mla_ragged"])
def test_attention_that_says_it_is_not_causal_has_no_mask(op_type: str) -> None:
    """Queries of a sequence all see the same keys: with equal queries, equal outputs."""
    causal = next(one for one in (*OWN, *FORMS) if one.op_type == op_type and "qo_indptr" in one.inputs)
    plain = Definition.model_validate(causal.as_json() | {"description": "Attention of encoders, not causal."})
    case = ops.case_named(plain, "medium-0")
    for definition, same in ((plain, True), (causal, False)):
        values = dict(ops.inputs_of(definition, case))
        for name in {"q", "q_nope", "q_pe"} & values.keys():
            values[name] = ops.tensor(values, name)[:1].expand_as(ops.tensor(values, name)).contiguous()
        start, stop = max(pairwise(ops.tensor(values, "qo_indptr").tolist()), key=lambda ends: ends[1] - ends[0])
        for outputs in (ops.truth(definition, values), by_pytorch(definition, values)):
            rows = outputs["output"][start:stop].float()
            assert torch.allclose(rows, rows[:1].expand_as(rows), atol=1e-2) == same


def test_attention_that_is_called_causal_stays_so_whatever_its_reference_says() -> None:
    entry = ops.load("mla_ragged", "mla_ragged_prefill_causal_h16_qk192_vo128").as_json()
    entry["reference"] = f"CAUSAL = False\n{entry['reference']}"
    definition = Definition.model_validate(entry)
    assert is_causal(definition, {})
    assert definition.constants.conflicts == ("causal mask is 1 by name and 0 by reference",)


def by_pytorch(definition: Definition, values: Values) -> Mapping[str, torch.Tensor]:
    adapter = lookup.adapter("torch", definition)
    assert adapter is not None
    api = resolve(STACKS["torch"], adapter.apis)
    assert isinstance(api, Mapping)
    return adapter.call(api, definition, values)


@pytest.mark.parametrize("form", ["decode", "prefill"])
@pytest.mark.parametrize("states", ["name", "reference", ""])
def test_a_gated_delta_rule_states_whether_it_normalises_queries_and_keys(form: str, states: str) -> None:
    entry = ops.load("gdn", f"gdn_{form}_qk2_v4_d32_k_last").as_json()
    entry["name"] += "_l2norm" * (states == "name")
    line = "    q, k = (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))\n"
    head, _, body = entry["reference"].rpartition("scale):\n")  # the last function is `run`
    entry["reference"] = f"{'USE_QK_L2NORM = True' * (states == 'reference')}\n{head}scale):\n{line}{body}"
    definition = Definition.model_validate(entry)
    verdicts = set()
    for case in ops.cases(definition, "small"):
        values = ops.inputs_of(definition, case)
        rulings = ops.judged(definition, case, ops.reference(definition, values), ops.truth(definition, values))
        verdicts |= {ruling.verdict for ruling in rulings.values()}
    assert verdicts == ({Verdict.PASS} if states else {Verdict.PASS, Verdict.FAIL})


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_a_gated_delta_rule_states_that_values_are_last_in_its_states(form: str) -> None:
    entry = ops.load("gdn", f"gdn_{form}_qk2_v4_d32_k_last").as_json()
    head, _, body = entry["reference"].rpartition("scale):\n")
    body = body.replace("return output, new_state", "return output, new_state.mT.contiguous()")
    entry["reference"] = f"{head}scale):\n    state = None if state is None else state.mT\n{body}"
    for name, verdicts in (("v_last", {Verdict.PASS}), ("k_last", {Verdict.PASS, Verdict.FAIL})):
        entry["name"] = f"gdn_{form}_{name}"
        definition = Definition.model_validate(entry)
        found = set()
        for case in ops.cases(definition, "small"):
            values = ops.inputs_of(definition, case)
            rulings = ops.judged(
                definition, case, ops.reference(definition, values), ops.truth(definition, values)
            )
            found |= {ruling.verdict for ruling in rulings.values()}
        assert found == verdicts
        assert (lookup.adapter("fla", definition) is None) == (name == "v_last")


def test_a_rotation_of_const_heads_has_an_oracle_whatever_their_numbers() -> None:
    entry = ops.load("rope", "rope_with_cos_sin_cache_neox_style_d64_rd32").as_json()
    for name, count in (("num_qo_heads", 6), ("num_kv_heads", 4)):
        entry["axes"][name] = {"type": "const", "value": count}
    definition = Definition.model_validate(entry)
    op, unknown = registry.for_definition(definition)
    assert unknown is None
    case = ops.case_named(definition, "medium-0")
    for one in (case, op.of_size(definition, case, 9, long=False)):
        values = ops.inputs_of(definition, one)
        rulings = ops.judged(definition, one, ops.reference(definition, values), ops.truth(definition, values))
        assert {ruling.verdict for ruling in rulings.values()} == {Verdict.PASS}


@pytest.mark.parametrize("definition", OWN, ids=lambda one: one.name)
def test_an_axis_that_a_definition_makes_const_has_that_size_in_all_cases(definition: Definition) -> None:
    ordinary = next(case for case in ops.cases(definition, "small") if case.size == "small")
    for axis, size in ordinary.axes.items():
        entry = definition.as_json()
        entry["axes"][axis] = {"type": "const", "value": size}
        changed = Definition.model_validate(entry)
        op, unknown = registry.for_definition(changed)
        assert unknown is None or axis in unknown
        cases = [] if unknown else [*op.planned(changed, sizes=("small",), seed=0)]
        for case in sorted(cases, key=lambda one: op.memory(changed, one))[:4]:
            assert axis not in case.axes
            ops.assert_inputs_fit(solve(changed, case), again=False)


@pytest.mark.parametrize(
    ("op_type", "name", "axis", "size"),
    [
        ("activation_quantize", "silu_and_mul_mxfp8_backward_both_k128", "M", 100),
        ("gemm_fp8", "gemm_fp8_blocks_n96_k256", "K_blocks", 7),
        ("gemm_fp8", "gemm_fp8_n96_k128_b32", "K_blocks", 48),
        ("gemm_fp8", "gemm_fp8_n96_k128_b32", "K_blocks", 129),
        ("mamba_ssd_combined", "ssd_combined_varlen_h4_d16_g2_s32", "seqlen", 4),
    ],
)
def test_a_const_axis_that_contradicts_the_others_has_no_oracle(
    op_type: str, name: str, axis: str, size: int
) -> None:
    entry = ops.load(op_type, name).as_json()
    entry["axes"][axis] = {"type": "const", "value": size}
    _, unknown = registry.for_definition(Definition.model_validate(entry))
    assert unknown is not None
    assert unknown.startswith(f"{axis} is {size}, and ")
