"""Definitions made of kernel calls: the dataset's names and shapes, and references that hold."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from extract_support import GOLDEN, drafts_of, named

from traceproof.dataset.definition import Definition
from traceproof.extract.merge import _judge_reference
from traceproof.models.reading import kernel
from traceproof.ops.drafts import Draft
from traceproof.ops.families.expert import mixture_draft
from traceproof.sandbox import Pool

ALL: dict[str, Draft] = {name: draft for path in GOLDEN for name, draft in drafts_of(path).items()}


def test_deepseek_at_tp8_ep8_needs_these_definitions() -> None:
    drafts = drafts_of(named("deepseek_v3"))
    names = set(drafts)
    assert {
        "mla_paged_decode_h16_ckv512_kpe64_ps1",
        "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
        "mla_ragged_prefill_causal_h16_qk192_vo128",
        "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
        "rmsnorm_h512",
        "rmsnorm_h1536",
        "fused_add_rmsnorm_h7168",
        "gemm_n256_k7168",
        "gemm_n2112_k7168",
        "top_k_top_p_sampling_from_probs_v129280",
    } < names
    assert "fused_add_rmsnorm_h512" not in names
    wanted = {"gemm": 10, "rmsnorm": 4, "mla_paged": 4, "sampling": 3, "rope": 1, "mla_ragged": 1, "moe": 1}
    counted = Counter(draft.op_type for draft in drafts.values())
    assert {name: counted[name] for name in wanted} == wanted  # other op_types may be added


def test_full_and_rank_shapes_of_projections_differ_as_tensor_parallelism_says() -> None:
    full, rank = drafts_of(named("llama_3_1_70b")), drafts_of(named("llama_3_1_70b"), per_rank=True)
    assert "gemm_n10240_k8192" in full
    assert "gemm_n2560_k8192" in rank
    assert "tp:4" in rank["gemm_n2560_k8192"].tags(["m"], tp=4, ep=1)


@pytest.mark.parametrize("draft", ALL.values(), ids=ALL)
def test_a_draft_is_described_takes_its_inputs_in_order_and_survives_a_round_trip(draft: Draft) -> None:
    definition = draft.definition(draft.tags(["model-a"], tp=1, ep=1))
    specs = [*definition.axes.values(), *definition.inputs.values(), *definition.outputs.values()]
    assert all(spec.description for spec in specs)
    assert definition.description
    assert "model:model-a" in definition.tags
    assert re.fullmatch(r"[a-z0-9_]+", definition.name)
    assert "$" not in definition.reference
    scope: dict[str, object] = {}
    exec(draft.reference, scope)  # noqa: S102 - our own text
    code = getattr(scope["run"], "__wrapped__", scope["run"]).__code__  # type: ignore[attr-defined]
    assert list(code.co_varnames[: code.co_argcount]) == list(draft.inputs)
    assert Definition.model_validate(definition.as_json()).digest == definition.digest


def one_of_each_form() -> dict[str, Draft]:
    """One small definition of every skeleton."""
    found: dict[str, Draft] = {}
    for name, draft in ALL.items():
        found.setdefault(re.sub(r"\d+", "#", name) + str(name.endswith("64")), draft)
    return {draft.name: draft.scaled_down or draft for draft in found.values()}


@pytest.mark.slow
@pytest.mark.parametrize("draft", one_of_each_form().values(), ids=one_of_each_form())
def test_a_reference_holds_against_its_oracle(draft: Draft, pool: Pool) -> None:
    torch.set_num_threads(1)
    finding = _judge_reference(draft.definition([]), draft.reference, pool)
    assert finding["no_oracle"] is None
    assert finding["problems"] == []
    assert finding["cases"] >= 3


WRONG = [
    ("rmsnorm_h512", "EPS = 1e-06", "EPS = 1e-05"),
    ("fused_add_rmsnorm_h7168", "+ residual.to(torch.float32)", ""),
    ("gemma_rmsnorm_h256", "+ WEIGHT_OFFSET", ""),
    ("mla_paged_decode_h16_ckv512_kpe64_ps64", "+ int(kv_last_page_len[row])", "+ PAGE_SIZE"),
    ("gdn_decode_qk4_v8_d128_k_last", "torch.sigmoid(b", "torch.tanh(b"),
    ("top_p_sampling_from_probs_v128256", "before <= p", "before + values <= p"),
]


@pytest.mark.parametrize(("name", "right", "wrong"), WRONG, ids=[item[0] for item in WRONG])
def test_a_planted_mistake_in_a_reference_is_found(name: str, right: str, wrong: str, pool: Pool) -> None:
    torch.set_num_threads(1)
    draft = ALL[name].scaled_down or ALL[name]
    reference = draft.reference.replace(right, wrong)
    assert reference != draft.reference
    finding = _judge_reference(draft.definition([]), reference, pool)
    assert finding["problems"]


MOE = {
    "experts": 64,
    "local_experts": 64,
    "hidden": 2048,
    "intermediate": 512,
    "quantisation": "bfloat16",
    "routing": "renormalise",
    "top_k": 4,
    "groups": 1,
    "kept_groups": 1,
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"routing": "softmax"}, "not renormalised"),
        ({"quantisation": "float8_e4m3fn block 128x128", "intermediate": 96}, "no multiple of the block"),
        ({"quantisation": "int4 GPTQConfig"}, "no such form"),
    ],
)
def test_experts_without_a_form_say_why(change: dict[str, object], why: str) -> None:
    facts: dict[str, object] = MOE | change
    made = mixture_draft(kernel("experts", count=1, path="experts", **facts))  # type: ignore[arg-type]
    assert isinstance(made, str)
    assert why in made
