"""From SGLang's reading, confirmed by transformers', to definitions with references that hold."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import op_support as ops
import pytest
import torch
from extract_support import GOLDEN, drafts_of, golden, named, reading_of

from traceproof.dataset.definition import Definition
from traceproof.extract import pipeline
from traceproof.extract.bootstrap import SUPPORTED
from traceproof.extract.merge import _judge_reference
from traceproof.extract.pipeline import Described, Unmapped, definitions_of, drafted, summary
from traceproof.extract.reading import ReaderEnvironment
from traceproof.models import catalogue
from traceproof.models.drafts import Choice, Draft
from traceproof.models.reading import KernelCall, ModelModule, Reading, Second, kernel
from traceproof.ops.families.expert import mixture_draft
from traceproof.ops.families.product import projection
from traceproof.sandbox import Pool
from traceproof.stacks.flashinfer import APIS


def confirmed(reading: Reading, model: str) -> tuple[list[KernelCall], list[Unmapped]]:
    calls, _ = pipeline.from_reading(reading)
    assert len(calls) >= 8
    agreed, differing, counts = pipeline.confirmed(calls, reading, catalogue.entries()[model].config)
    assert counts == []
    return agreed, differing


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_transformers_confirms_every_call_of_a_stored_model(path: Path) -> None:
    reading = reading_of(path)
    assert reading.second.problem == ""
    agreed, differing = confirmed(reading, golden(path)["model"])
    assert agreed
    assert differing == []


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_reading_exists_for_every_supported_version(path: Path) -> None:
    assert golden(path)["sglang"] == list(SUPPORTED)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_this_sglang_still_gives_the_golden_reading(path: Path) -> None:
    python = os.environ.get("TRACEPROOF_EXTRACT_PYTHON")
    if not python:
        pytest.skip("package absent: TRACEPROOF_EXTRACT_PYTHON names no interpreter with SGLang")
    checkout = os.environ.get("TRACEPROOF_SGLANG_PATH")
    environment = ReaderEnvironment(Path(python), Path(checkout) if checkout else None)
    stored = reading_of(path)
    config = catalogue.entries()[golden(path)["model"]].config
    found = environment.read(config, stored.parallel)
    assert found.modules == stored.modules
    assert found.second == stored.second


def slipped(reading: Reading, kind: str, **facts: object) -> Reading:
    """The reading with other facts in transformers' modules of a kind."""
    modules = tuple(
        replace(one, facts=dict(one.facts) | facts) if one.kind == kind else one for one in reading.second.modules
    )
    return replace(reading, second=replace(reading.second, modules=modules))


def changed(name: str, *kinds: str, **facts: object) -> Reading:
    """A stored reading with other facts in SGLang's modules of some kinds, or whose paths end so."""
    reading = reading_of(named(name))

    def wanted(one: ModelModule) -> bool:
        return one.kind in kinds or one.path.rpartition(".")[2] in kinds

    modules = (replace(one, facts=dict(one.facts) | facts) if wanted(one) else one for one in reading.modules)
    return replace(reading, modules=tuple(modules))


def described(reading: Reading, model: str, *, second: bool = True) -> Described:
    return definitions_of(reading, catalogue.entries()[model].config, Choice(second_reading=second))


SLIPS: list[tuple[str, dict[str, object], str]] = [
    ("attention", {"heads": 64}, "heads: SGLang 32, transformers 64"),
    ("attention", {"kv_heads": 16}, "kv_heads: SGLang 4, transformers 16"),
    ("attention", {"qk_dim": 64}, "dim: SGLang 128, transformers 64"),
    ("attention", {"window": 1024}, "window: SGLang None, transformers 1024"),
    ("attention", {"sinks": True}, "sinks: SGLang False, transformers True"),
    ("norm", {"eps": 1e-5}, "eps: SGLang 1e-06, transformers 1e-05"),
    ("norm", {"variant": "gemma"}, "variant: SGLang 'plain', transformers 'gemma'"),
    ("rotary", {"rotary_dim": 64}, "rotary_dim: SGLang 128, transformers 64"),
    ("rotary", {"style": "gptj"}, "style: SGLang 'neox', transformers 'gptj'"),
    ("experts", {"experts": 64}, "experts: SGLang 128, transformers 64"),
    ("experts", {"top_k": 4}, "top_k: SGLang 8, transformers 4"),
    ("experts", {"renormalise": False}, "routing: SGLang 'renormalise', transformers 'softmax'"),
    ("experts", {"intermediate": 512}, "intermediate: SGLang 768, transformers 512"),
    ("embedding", {"vocab": 151937}, "vocab: SGLang 151936, transformers 151937"),
    ("projections", {"o_proj": [4096, 4096]}, "SGLang has 2048 x 4096, transformers 4096 x 4096"),
]


@pytest.mark.parametrize(("kind", "facts", "told"), SLIPS, ids=[f"{kind} {told[:20]}" for kind, _, told in SLIPS])
def test_what_only_one_reading_has_is_told_and_others_kept(kind: str, facts: dict[str, object], told: str) -> None:
    reading = reading_of(named("qwen3_30b"))
    all_of_them, _ = confirmed(reading, "qwen3_30b_a3b")
    agreed, differing = confirmed(slipped(reading, kind, **facts), "qwen3_30b_a3b")
    assert any(told in item.why for item in differing), [item.why for item in differing]
    assert all(item.disagreed for item in differing)
    assert 0 < len(agreed) < len(all_of_them)
    assert len(agreed) + len(differing) == len(all_of_them)


def test_a_slip_in_sglangs_reading_is_named() -> None:
    _, [item, router] = confirmed(changed("deepseek_v3", "experts", experts=257, local_experts=33), "deepseek_v3")
    assert router.why.startswith("router: experts: SGLang 257, transformers 256")
    assert "experts: SGLang 257, transformers 256" in item.why
    assert "local_experts: SGLang 33, transformers 32" in item.why
    _, [item] = confirmed(changed("llama_3_1_70b", "o_proj", rank_k=512), "llama_3_1_70b")
    assert "SGLang's rank has 8192 x 512, which is no share of 8192 x 8192 by 4" in item.why


def test_without_a_second_reading_nothing_is_confirmed_and_the_reason_is_told() -> None:
    reading = replace(reading_of(named("llama_3_1_70b")), second=Second(problem="transformers has no model 'x'"))
    agreed, differing = confirmed(reading, "llama_3_1_70b")
    assert agreed == []
    assert all("transformers has no model 'x'" in item.why for item in differing)


def test_the_summary_counts_what_is_described_and_names_what_is_not() -> None:
    reading = slipped(reading_of(named("qwen3_30b")), "norm", eps=1e-5)
    found = described(reading, "qwen3_30b_a3b")
    kinds = {"linear", "gqa", "rotary", "experts", "router", "sampling"}
    assert {call.kind for call, _ in found.made} == kinds
    line = summary("qwen3", found.calls, found.left)
    assert line == "qwen3: 9 of 15 kernel calls described; 6 not: 6 norm (readings differ)"


def test_a_call_that_transformers_has_less_often_is_written_and_the_counts_are_told() -> None:
    reading = reading_of(named("qwen3_30b"))
    modules = tuple(replace(one, count=47) if one.kind == "attention" else one for one in reading.second.modules)
    found = described(replace(reading, second=replace(reading.second, modules=modules)), "qwen3_30b_a3b")
    assert "gqa" in {call.kind for call, _ in found.made}
    assert found.counts == ["model.layers.*.self_attn.attn: gqa: counted 48 times in SGLang, 47 in transformers"]


def test_encoders_and_what_stands_beside_them_make_no_calls() -> None:
    reading = reading_of(named("llama_3_1_70b"))

    def inner(path: str) -> str:
        return f"language_model.{path}" if path else "language_model"

    language = tuple(
        replace(one, path=inner(one.path), parent=inner(one.parent) if one.parent is not None else "")
        for one in reading.modules
    )
    tower = [("vision", "block", ""), ("vision.layers.*", "block", "vision"), ("projector", "weights", "")]
    tower += [("vision.layers.*.qkv", "linear", "vision.layers.*"), ("projector.up", "linear", "projector")]
    facts = {"full_n": 8, "full_k": 8, "rank_n": 8, "rank_k": 8, "conv": False, "dtype": "bfloat16"}
    others = tuple(ModelModule(path, parent, "X", "Tower", kind, facts, 1) for path, kind, parent in tower)
    calls, left = pipeline.from_reading(replace(reading, modules=(*language, *others)))
    assert {item.path for item in left if item.why.startswith("encoder")} == {"vision", "projector"}
    assert not any(path.startswith(("vision", "projector")) for call in calls for path in call.paths)


def test_a_quantised_projection_is_described_in_the_datasets_form_and_as_launched() -> None:
    found = described(reading_of(named("deepseek_v3")), "deepseek_v3")
    names = {draft.name for _, draft in found.made}
    assert {"gemm_n7168_k16384", "gemm_fp8_block128_n7168_k16384"} <= names
    assert not [item for item in found.left if item.why.startswith("projection")]
    assert not any(item.disagreed for item in found.left)


def test_a_projection_in_float8_by_tensor_has_the_form_that_scales_by_token_and_weight() -> None:
    made = ALL["gemm_fp8_tensor_n10240_k8192"]
    assert [made.axes[axis]["value"] for axis in ("N_blocks", "K_blocks")] == [1, 1]


@pytest.mark.parametrize("kind", ["block128", "row", "tensor"])
def test_projections_in_float8_whose_last_blocks_are_cut_short_hold_against_their_oracle(kind: str) -> None:
    definition = drafted(projection(160, 320, role="kv_a_proj", kind=kind))
    assert ops.failures(definition, ops.reference, "small") == {}


def test_a_convolution_without_silu_becomes_none_and_one_with_it_two_definitions() -> None:
    assert {"causal_conv1d_c10240_w4", "causal_conv1d_update_c10240_w4"} <= ALL.keys()
    _, left = pipeline.from_reading(changed("nemotron_h", "linear", activation="gelu"))
    assert "causal convolution with the activation gelu: no form" in [item.why for item in left]


def test_a_layer_norm_keeps_the_dtype_of_its_weight_and_may_have_no_bias() -> None:
    assert ALL["layernorm_h128"].inputs["weight"]["dtype"] == "float32"
    _, left = pipeline.from_reading(changed("deepseek_v3_2", "norm", axes=2))
    assert "norm with a weight per head: no form" in [item.why for item in left]
    assert list(ALL["layernorm_no_bias_h128"].inputs) == ["hidden_states", "weight"]


def test_weights_that_sglang_can_not_pack_here_become_no_definition() -> None:
    reading = changed("qwen3_30b", "linear", "experts", scheme="gptq")
    found = described(replace(reading, unpacked="gptq: ValueError: unknown"), "qwen3_30b_a3b")
    assert found.counts == ["read as if not quantised, gptq: ValueError: unknown"]
    assert {call.kind for call, _ in found.made} >= {"norm", "gqa"}
    assert {draft.name for call, draft in found.made if call.kind == "linear"} == {"gemm_n151936_k2048"}
    whys = [item.why for item in found.left]
    assert "projection in gptq: no form" in whys
    assert "experts with weights packed by gptq: no form" in whys


def test_sparse_attention_becomes_the_datasets_three_definitions() -> None:
    reading = reading_of(named("deepseek_v3_2"))
    made = described(reading, "deepseek_v3_2").made
    assert [draft.name for call, draft in made if call.kind.startswith("dsa")] == [
        "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64",
        "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps1",
        "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64",
    ]
    left = described(slipped(reading, "indexer", topk=1024), "deepseek_v3_2").left
    told = [item.why for item in left if item.disagreed]
    assert len(told) == 2
    assert any("topk: SGLang 2048, transformers [1024]" in why for why in told)
    assert any("topk: SGLang 2048, transformers 1024" in why for why in told)


@pytest.mark.parametrize(
    ("model", "kind", "facts", "why"),
    [
        ("qwen3_30b", "experts", {"beside": "gemm1_alpha, bias"}, "more than silu: gemm1_alpha, bias, which"),
        ("qwen3_30b", "top_k", {"bias": "float32"}, "experts with routing by softmax and a bias: no form"),
        ("qwen3_30b", "attention", {"chunks": True}, "attention within chunks: no form"),
        ("deepseek_v3", "attention", {"window": 1024}, "latent attention with window"),
        ("deepseek_v3", "top_k", {"own": True}, "routing by a function of the model's own: no form"),
        ("qwen3_30b", "top_k", {"scoring": "sigmoid"}, "routing by sigmoid, renormalised: no form"),
    ],
)
def test_what_a_form_can_not_say_becomes_none(model: str, kind: str, facts: dict[str, object], why: str) -> None:
    calls, left = pipeline.from_reading(changed(model, kind, **facts))
    assert any(why in item.why for item in left)
    experts = {call["routing"] for call in calls if call.kind == "experts"}
    assert model != "deepseek_v3" or experts == (set() if facts.get("own") else {"deepseek_v3"})


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_a_bias_within_groups_means_sigmoid_scores(scoring: str) -> None:
    calls, _ = pipeline.from_reading(changed("deepseek_v3", "top_k", scoring=scoring))
    assert {call["routing"] for call in calls if call.kind in {"experts", "router"}} == {"deepseek_v3"}


def test_each_norm_becomes_the_forms_that_the_model_calls() -> None:
    reading = reading_of(named("llama_3_1_70b"))
    calls = [call for call in pipeline.from_reading(reading)[0] if call.kind == "norm"]
    assert [(call.role, call["uses"], call.count) for call in calls] == [
        ("input_layernorm", "alone", 1),
        ("post_attention_layernorm", "adding", 80),
        ("input_layernorm", "adding", 79),
        ("norm", "adding", 1),
    ]
    found = described(reading, "llama_3_1_70b")
    assert found.counts == []
    names = [draft.name for call, draft in found.made if call.kind == "norm"]
    assert names == ["rmsnorm_h8192", "fused_add_rmsnorm_h8192"]


def bent(**facts: object) -> dict[str, Draft]:
    """Definitions of Llama's attention if it were as Gemma's or gpt-oss's: both readings say so."""
    theirs = {name: 128 if name == "window" else value for name, value in facts.items()}
    reading = slipped(changed("llama_3_1_70b", "attention", **facts), "attention", **theirs)
    made = described(reading, "llama_3_1_70b").made
    return {draft.name: draft for call, draft in made if call.kind == "gqa"}


ALL: dict[str, Draft] = {name: draft for path in GOLDEN for name, draft in drafts_of(path).items()}
ALL |= bent(window=127, sinks=True) | bent(window=127, logit_cap=50.0)
OTHERS = (
    changed("llama_3_1_70b", "linear", dtype="float8_e4m3fn", scheme="float8_e4m3fn by tensor"),
    changed("deepseek_v3_2", "norm", bias=False),
    changed("deepseek_v3", "experts", quantisation="bfloat16"),
)
for _reading in OTHERS:
    _made, _ = pipeline.drafts(pipeline.from_reading(_reading)[0], Choice())
    ALL |= {one.name: one for _, one in _made if one.op_type in {"gemm_fp8", "layernorm", "moe"}}


def test_attention_with_a_window_a_soft_cap_or_sinks_has_its_forms() -> None:
    names = {name for name in ALL if name.endswith(("_window_sinks", "_window_capped"))}
    assert "gqa_paged_decode_h16_kv2_d128_ps1_window_sinks" in names
    assert "gqa_ragged_prefill_causal_h16_kv2_d128_window_capped" in names
    assert list(ALL["gqa_paged_decode_h16_kv2_d128_ps1_window_sinks"].outputs) == ["output"]


def test_deepseek_at_tp8_ep8_needs_these_definitions() -> None:
    drafts = drafts_of(named("deepseek_v3"))
    names = set(drafts)
    assert {
        "mla_paged_decode_h16_ckv512_kpe64_ps1", "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
        "mla_ragged_prefill_causal_h16_qk192_vo128",
        "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048", "rmsnorm_h512", "rmsnorm_h1536",
        "fused_add_rmsnorm_h7168", "gemm_n256_k7168", "gemm_n2112_k7168",
        "top_k_top_p_sampling_from_probs_v129280",
    } < names  # fmt: skip
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
    definition = drafted(draft, draft.tags(["model-a"], tp=1, ep=1))
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


# functions of FlashInfer 0.6 and 0.7 that no ground truth here calls
OTHER_FUNCTIONS = {
    "activation.gelu_tanh_and_mul",
    "activation.silu_and_mul",
    "fused_moe.cutlass_fused_moe",
    "fused_moe.fused_topk_deepseek",
    "fused_moe.trtllm_bf16_moe",
    "norm.layernorm",
}


def test_definitions_name_functions_that_the_stack_has() -> None:
    called = {name.removeprefix("flashinfer.").replace(":", ".") for names in APIS.values() for name in names}
    named = {draft.fi_api for draft in ALL.values() if draft.fi_api}
    assert {api for api in named if api.startswith("gdn")}
    assert named - called - OTHER_FUNCTIONS == set()


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
    finding = _judge_reference(drafted(draft), draft.reference, pool)
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
    finding = _judge_reference(drafted(draft), reference, pool)
    assert finding["problems"]


MOE: dict[str, object] = {"experts": 64, "local_experts": 64, "hidden": 2048, "intermediate": 512, "top_k": 4}
MOE |= {"quantisation": "bfloat16", "routing": "renormalise", "groups": 1, "kept_groups": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"clamped": True},
        {"routing": "softmax"},
        {"routing": "softmax", "quantisation": "float8_e4m3fn block 128x128"},
    ],
)
def test_experts_of_newer_forms_hold_against_their_oracle(change: dict[str, object]) -> None:
    facts: dict[str, object] = MOE | change
    made = mixture_draft(kernel("experts", count=1, path="experts", **facts))  # type: ignore[arg-type]
    assert isinstance(made, Draft)
    assert made.scaled_down is not None
    definition = drafted(made.scaled_down)
    assert ops.failures(definition, ops.reference, "small") == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"quantisation": "float8_e4m3fn block 128x128", "intermediate": 96}, "no multiple of the block"),
        ({"quantisation": "int4 GPTQConfig"}, "no such form"),
        (
            {"quantisation": "int4 GPTQConfig", "clamped": True},
            "gpt-oss's activation: the dataset has no such form",
        ),
    ],
)
def test_experts_without_a_form_say_why(change: dict[str, object], why: str) -> None:
    facts: dict[str, object] = MOE | change
    made = mixture_draft(kernel("experts", count=1, path="experts", **facts))  # type: ignore[arg-type]
    assert isinstance(made, str)
    assert why in made
