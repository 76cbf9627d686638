"""Lossless cases: no right way of computing is refused, and every wrong rounding of an output is."""

from __future__ import annotations

from functools import cache

import op_support as ops
import planted_attention as planted
import pytest
import torch

from traceproof.judge.numerics import exactly
from traceproof.ops import registry
from traceproof.ops.base import dtype_of
from traceproof.ops.compare import Quantised
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve
from traceproof.run.plan import PlanSelection, planned_alone
from variants import variants_of

DEFINITIONS = {definition.name: definition for definition in (*ops.OWN, *planted.ALL)}
# What has no middle: the last elements, states of eight bits, a sum with a residual of 0; quotients and roots
COPIED = {
    ("causal_conv1d", "new_state"),
    ("mamba_ssd_combined", "final_states"),
    ("rmsnorm", "residual_out"),
    *(("kda", name) for name in ("conv_state_out", "state_out")),
    ("gdn", "conv_state_out"),
    ("trtllm_gen_routing_e24_k3_t4", "topk_weights"),
    *((f"{name}fused_kda_decode_h2_d16", "output") for name in ("", "packed_")),
}
WITHOUT = {
    "attention",
    "block_sparse",
    "msa_proxy",
    "msa_topk",
    "fp8_paged_mqa_logits_h8_d32_bs32",
    "concat_mla_k_h3_nope48_rope16",
    "concat_mla_kv_fp8_h3_kv160_rope16",
    "fmha_v2_prefill_fp8_h2_d32",
    "gdn_mtp_replay_qk2_v4_d16",
    "single_prefill_mask_alibi_h4_kv2_d32",
    "trtllm_fmha_packed_h3_d32",
    "xqa_mla_h4_ckv32_qk48_ps8",
    "gdn2",
    "gdp",
    "kda_recurrent_q2_v4_d32",
    "topk",
    "trtllm_paged_dcp_spec",
    "page_append",
    "rmsnorm_sigmoid_gate",
    "sampling",
    "softcap",
    *(
        "comm",
        "all_gather_gated_residual_next_rmsnorm",
        "all_gather_rmsnorm_fp4_quantize",
    ),
    *("mhc_pre_big_fuse", "fused_rmsnorm_silu_h96", "add_rmsnorm_fp4quant_h96"),
    *("mla_rope_quantize_fp8_h4_rope32", "rope_quantize_fp8_append_h4_kv2_rope32_ps4"),
    *("moe_preprocess", "hash_topk_e48_k4_v64"),
    "layernorm_no_bias_h96",
}  # `ops.lossless` says why; copies are exact


@cache
def lossless(name: str) -> SolvedCase | None:
    definition = DEFINITIONS[name]
    planned = planned_alone(definition, PlanSelection(sizes=("small",), hidden_seed=5)).cases
    case = next((one.case for one in planned if one.id == "hidden-lossless"), None)
    return None if case is None else solve(definition, case)


def narrow(subject: SolvedCase) -> dict[str, torch.dtype]:
    """The outputs of 16 bits."""
    kinds = {name: dtype_of(spec) for name, spec in subject.definition.outputs.items()}
    return {name: dtype for name, dtype in kinds.items() if dtype in {torch.bfloat16, torch.float16}}


def away(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to nearest, ties away from zero."""
    near = value.to(dtype)
    beyond = torch.nextafter(near, near * float("inf"))
    middle = (near.double() + beyond.double()) / 2
    return torch.where((near.double().abs() < value.abs()) & (middle == value), beyond, near)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_exact_value_alone_passes(name: str) -> None:
    definition = DEFINITIONS[name]
    subject = lossless(name)
    if (
        {definition.op_type, name} & WITHOUT
        or "topk_indices" in definition.outputs
        or "rope_theta" in definition.inputs
    ):
        assert subject is None
        return
    assert subject is not None
    floats = [
        name for name, one in subject.inputs.items() if isinstance(one, torch.Tensor) and one.is_floating_point()
    ]
    assert {*floats} <= {*registry.get(definition.op_type).of_form(definition).lossless(definition)}
    for output, dtype in narrow(subject).items():
        value = subject.oracle[output].float().double()
        right, tied = exactly(value, dtype), away(value, dtype)
        copied = not {(definition.op_type, output), (name, output)}.isdisjoint(COPIED)
        assert torch.equal(tied.double(), right) == copied
        for reference in (True, False):
            assert subject.ruling(output, right.to(dtype), reference=reference).verdict is Verdict.PASS
            for wrong in (right * 1.004).to(dtype), *(() if copied else (tied,)):
                assert subject.ruling(output, wrong, reference=reference).verdict is Verdict.FAIL


def truncated(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded towards zero."""
    near = value.to(dtype)
    return torch.where(near.double().abs() > value.abs(), torch.nextafter(near, near * 0), near)


@pytest.mark.parametrize("name", [one.name for one in DEFINITIONS.values() if one.op_type == "moe"])
def test_experts_on_a_gpu_are_neither_cut_off_nor_too_large_where_requantising_loses_nothing(name: str) -> None:
    subject = lossless(name)
    assert subject is not None
    [(output, dtype)] = narrow(subject).items()
    value = subject.oracle[output]
    near = value.to(dtype)
    for given, right in ((near, True), (truncated(value, dtype), False), ((value * 1.003).to(dtype), False)):
        ruling = subject.ruling(output, given, on_gpu=True)
        assert (ruling.verdict is Verdict.PASS) == right, ruling.message


def test_what_a_gpu_need_not_compute_exactly_is_exact_on_a_cpu_alone() -> None:
    subject = lossless("gemm_n96_k160")
    assert subject is not None
    [(output, dtype)] = narrow(subject).items()
    near = subject.oracle[output].to(dtype)
    near.view(-1)[0] *= 1 + torch.finfo(dtype).eps
    found = [subject.ruling(output, near, reference=True, on_gpu=on_gpu).verdict for on_gpu in (False, True)]
    assert found == [Verdict.FAIL, Verdict.PASS]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_no_equivalent_variant_is_refused(name: str) -> None:
    subject, variants = lossless(name), variants_of(DEFINITIONS[name].op_type)
    assert variants
    if subject is None:
        return
    for variant in variants:
        for output, value in (variant.make(subject) or {}).items():
            quantised = isinstance(subject.expected(output).comparison, Quantised)
            for reference in (False,) if quantised and " in " in variant.name else (False, True):
                ruling = subject.ruling(output, value, reference=reference)
                assert ruling.verdict is Verdict.PASS, f"{variant.name}: {output}: {ruling.message}"
