"""SGLang's adapters with kernels that PyTorch computes by the contract read off SGLang's sources."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import op_support as support
import planted_attention as planted
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.environments.building import op_types
from traceproof.ops import lookup, registry
from traceproof.ops.adapter import Adapter
from traceproof.ops.base import Values
from traceproof.ops.families.attention import SPLITS
from traceproof.ops.families.expert import sglang_choice
from traceproof.ops.families.routing import Method, choose, routing_of
from traceproof.reasons import Skip
from traceproof.run.schema import environment_of
from traceproof.run.trusted import Implementation
from traceproof.stacks.sglang import KERNELS, stand_in_for_kernels

Api = dict[str, Callable[..., Any]]
pytestmark = pytest.mark.usefixtures("one_thread")


def adapter_of(definition: Definition, truth: str = "sglang") -> Adapter:
    """A ground truth's adapter for a definition."""
    found = lookup.adapter(truth, definition)
    assert found is not None
    return found


def kernel(definition: Definition, api: Api) -> support.Kernel:
    """The adapter's call as the judge's helper wants it; fails where an input is written."""
    adapter = adapter_of(definition)
    api = {key: api[key] for key in adapter.apis}

    def run(_: Definition, inputs: Values) -> list[torch.Tensor]:
        before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        outputs = adapter.empty(definition, inputs)
        outputs = adapter.call(api, definition, inputs) if outputs is None else outputs
        assert all(torch.equal(support.tensor(inputs, name), value) for name, value in before.items())
        return [outputs[name] for name in definition.outputs]

    return run


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32."""
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, eps: float = 1.0) -> None:
    """Writes over its input unless it is told where."""
    (x if out is None else out).copy_(normed(x, weight, eps))


def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1.0) -> None:
    """The variance of the exact sum, the values of the rounded one."""
    total = x.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    x.copy_(residual.float() * weight.float() * scale)


NORMS: Api = {
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "triton_rmsnorm": lambda x, weight, eps: normed(x, weight, eps).to(x.dtype),
}


def test_the_norm_of_a_size_that_is_not_compiled_is_tritons_and_a_fused_one_too_wide_has_none() -> None:
    def named(form: str, hidden: int) -> str | None:
        found = lookup.adapter("sglang", support.variant(support.load("rmsnorm", form), hidden_size=hidden))
        return found.name if found is not None else None

    sizes = (96, 128, 512, 1536, 2304, 8448, 16384, 16896)  # above 8192 it wants a multiple of 512
    assert [size for size in sizes if named("rmsnorm_h96", size) == "layernorm.fused_rmsnorm"] == [96, 8448, 16896]
    assert {named("rmsnorm_h96", size) for size in sizes} == {"layernorm.fused_rmsnorm", "layernorm.norm.rmsnorm"}
    assert named("fused_add_rmsnorm_h96", 8200) is named("fused_add_rmsnorm_h96", 16384) is None


@pytest.mark.parametrize("hidden", [96, 128, 2048])
@pytest.mark.parametrize("name", ["rmsnorm_h96", "fused_add_rmsnorm_h96"])
def test_norms_are_called_as_they_want_to_be(name: str, hidden: int) -> None:
    definition = support.variant(support.load("rmsnorm", name), hidden_size=hidden)
    assert not support.failures(definition, kernel(definition, NORMS))


def test_norm_modules_are_compiled_by_size_and_dtype_and_fused_ones_by_dtype() -> None:
    norms = [support.variant(support.load("rmsnorm", "rmsnorm_h96"), hidden_size=size) for size in (128, 2048)]
    fused = [
        support.variant(support.load("rmsnorm", "fused_add_rmsnorm_h96"), hidden_size=size) for size in (128, 2048)
    ]
    labels = [{m.label for one in group for m in adapter_of(one).modules(one, (9, 0))} for group in (norms, fused)]
    assert [len(group) for group in labels] == [2, 1]
    assert all(module.compiles for one in (*norms, *fused) for module in adapter_of(one).modules(one, (9, 0)))


ROPE = [one for one in support.definitions("rope") if lookup.adapter("sglang", one) is not None]


def rotary_embedding(*arguments: Any) -> None:  # noqa: ANN401 - the kernel's own arguments
    """In place, on tokens by heads times channels."""
    positions, query, key, head_size, cache, is_neox = arguments
    assert positions.dtype == torch.int64
    assert query.dim() == key.dim() == 2
    half = cache.shape[-1] // 2
    cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)
    first = torch.arange(half) if is_neox else 2 * torch.arange(half)
    second = first + (half if is_neox else 1)
    for flat in (query, key):
        x = flat.view(len(flat), -1, head_size)
        one, two = x[..., first].float(), x[..., second].float()
        x[..., first], x[..., second] = (one * cos - two * sin).to(x.dtype), (two * cos + one * sin).to(x.dtype)


@pytest.mark.parametrize("definition", ROPE, ids=lambda definition: definition.name)
def test_the_rotary_kernel_is_called_as_it_wants_to_be(definition: Definition) -> None:
    assert not support.failures(definition, kernel(definition, {"rotary_embedding": rotary_embedding}))


@pytest.fixture
def stand_in() -> Iterator[None]:
    """SGLang's stand-in for its kernel package, as a worker that ran something else may have it."""
    before = list(sys.meta_path)
    stand_in_for_kernels()
    yield
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == KERNELS]:
        del sys.modules[name]


@pytest.mark.usefixtures("stand_in")
def test_a_stand_in_is_not_taken_for_the_package() -> None:
    lacking = adapter_of(ROPE[0]).lacking()
    assert lacking is not None
    assert lacking.reason is Skip.PACKAGE_ABSENT
    assert KERNELS in lacking.message


@pytest.mark.parametrize("definition", [support.load("rmsnorm", "rmsnorm_h96"), ROPE[0]], ids=lambda one: one.name)
def test_the_native_forms_are_a_ground_truth_of_their_own_without_a_gpu(definition: Definition) -> None:
    reasons = {name: Implementation(name).unavailable(definition) for name in ("sglang", "sglang_native")}
    assert {name: found.reason for name, found in reasons.items() if found is not None} == {
        "sglang": Skip.NO_CUDA,
        "sglang_native": Skip.PACKAGE_ABSENT,  # SGLang is not installed where the tests run
    }
    assert environment_of("sglang_native") == "sglang"


def test_a_stack_reaches_what_any_of_its_ground_truths_calls() -> None:
    assert set(op_types("sglang")) >= {"rmsnorm", "rope", "moe", "gdn", "mamba_ssu"}


MIN_BLOCK = 32  # the decode kernel cuts rows at multiples of it
FORMS = [name for name in planted.FORMS if name != "dsa_sparse"]


def softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [n, heads, width] over keys [m, key heads, width], weights rounded; log-sum-exp by e."""
    ratio = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(ratio, 1) for x in (k, v))
    logits = torch.einsum("nhd,mhd->hnm", q.float(), wide_k) * scale
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    mixed = torch.einsum("hnm,mhd->nhd", weights.to(v.dtype).float(), wide_v) / total.permute(1, 0, 2)
    return mixed, (logits.amax(-1) + torch.log(total[..., 0])).T


def decode_attention(*arguments: Any, has_mla: bool) -> None:  # noqa: ANN401 - the kernel's own arguments
    """Writes what it cut a row into, leaves the rest; a row without tokens would be 0 / 0."""
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, *numbers = arguments
    num_kv_splits, max_kv_splits, sm_scale, k_scale, v_scale = numbers
    assert max_kv_splits == attn_logits.shape[2] == SPLITS
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert attn_lse.is_contiguous()
    assert kv_indices.dtype == torch.int64  # its offsets are products with it
    assert not has_mla or (k_buffer.shape[-1], v_buffer.shape[-1]) == (576, 512)
    attn_logits.fill_(math.nan)
    for row, (start, end) in enumerate(pairwise(kv_indptr.tolist())):
        splits = int(num_kv_splits[row])
        step = math.ceil(math.ceil((end - start) / splits) / MIN_BLOCK) * MIN_BLOCK
        parts = []
        for part in range(splits):
            tokens = kv_indices[start + step * part : min(start + step * (part + 1), end)]
            if len(tokens):
                mixed, lse = softmax(q[row : row + 1], k_buffer[tokens], v_buffer[tokens], sm_scale)
                attn_logits[row, :, part], attn_lse[row, :, part] = mixed[0], lse[0]
                parts.append(part)
        weights = torch.softmax(attn_lse[row, :, parts], -1)[..., None]
        o[row] = (attn_logits[row, :, parts] * weights).sum(1) if parts else math.nan


def extend_attention(*arguments: Any, sm_scale: float, lse_extend: torch.Tensor) -> None:  # noqa: ANN401 - the kernel's own arguments
    """Queries see all of their prefix, and of the new tokens those up to their own."""
    q, k, v, o, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, *options, max_len_extend, _, _ = arguments
    assert options == [None, True, None]  # no mask of its own, causal
    assert arguments[-2:] == (1.0, 1.0)  # scales of keys and values
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert max_len_extend == qo_indptr.diff().max()
    assert len(q) == len(k) == len(v) == qo_indptr[-1]
    for (start, end), (first, last) in zip(
        pairwise(qo_indptr.tolist()), pairwise(kv_indptr.tolist()), strict=True
    ):
        prefix, count = kv_indices[first:last], end - start
        if count:
            keys = torch.cat([k_buffer[prefix], k[start:end]])
            values = torch.cat([v_buffer[prefix], v[start:end]])
            seen = torch.arange(count)[:, None] + len(prefix)
            hidden = torch.arange(len(keys))[None] > seen
            o[start:end], lse_extend[start:end] = softmax(q[start:end], keys, values, sm_scale, hidden)


API: dict[str, Callable[..., Any]] = {"decode_attention": decode_attention, "extend_attention": extend_attention}


@pytest.mark.parametrize("name", FORMS)
def test_the_kernels_are_called_as_they_want_to_be(name: str) -> None:
    definition = planted.form(name)
    called = "decode_attention" if "decode" in name else "extend_attention"
    assert adapter_of(definition).apis == (called,)
    assert not support.failures(definition, kernel(definition, API))


@pytest.mark.parametrize("case", ["small-1", "medium-0", "edge-empty-row", "edge-all-empty"])
def test_latent_attention_at_its_published_widths_says_so(case: str) -> None:
    definition = support.variant(planted.mla(prefill=False, page=16), Dc=512, Dp=64)
    planned = support.case_named(definition, case)
    told: list[bool] = []

    def listening(*arguments: Any, has_mla: bool) -> None:  # noqa: ANN401 - handed on
        told.append(has_mla)
        decode_attention(*arguments, has_mla=has_mla)

    inputs = support.inputs_of(definition, planned)
    outputs = adapter_of(definition).call({"decode_attention": listening}, definition, inputs)
    known = support.truth(definition, support.inputs_of(definition, planned))
    rulings = support.judged(definition, planned, [outputs[name] for name in definition.outputs], known)
    assert {ruling.verdict.value for ruling in rulings.values()} == {"pass"}
    assert told == [True] or (case == "edge-all-empty" and not told)


def test_queries_beyond_the_keys_see_nothing_and_are_not_handed_over() -> None:
    definition = planted.form("gqa_ragged")
    planned = support.case_named(definition, "edge-q-longer")
    inputs = support.inputs_of(definition, planned)
    handed: list[int] = []

    def counting(q: torch.Tensor, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - handed on
        handed.append(len(q))
        extend_attention(q, *arguments, **options)

    outputs = adapter_of(definition).call({"extend_attention": counting}, definition, inputs)
    unseen = outputs["lse"].isinf().all(-1)
    assert handed == [int((~unseen).sum())]
    assert 0 < handed[0] < len(unseen)
    assert not outputs["output"][unseen].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "served"),
    [
        (4, 4, False),  # its kernel rounds every product
        (32, 8, True),
        (128, 1, True),
        (24, 1, True),
        (48, 2, False),  # a tile of 16 heads would reach into the next key head's
        (64, 2, True),
    ],
)
def test_decode_is_of_head_counts_that_the_kernel_has_right(heads: int, kv_heads: int, *, served: bool) -> None:
    definition = planted.gqa(prefill=False, page=16, heads=heads, kv_heads=kv_heads)
    assert (lookup.adapter("sglang", definition) is not None) == served
    prefill = planted.gqa(prefill=True, page=16, heads=heads, kv_heads=kv_heads)
    assert lookup.adapter("sglang", prefill) is not None


def test_a_dtype_that_the_kernel_would_round_is_a_typed_skip() -> None:
    described = planted.form("gqa_ragged").as_json()
    for name in "qkv":
        described["inputs"][name]["dtype"] = "float32"
    definition = Definition.model_validate(described)
    found = Implementation("sglang").unavailable(definition)
    assert found is not None
    assert found.reason is Skip.DTYPE_UNSUPPORTED
    assert "float32" in found.message


def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """[M, K] by [K, N], summed in float32."""
    assert a.shape[1] == b.shape[0]
    assert a.dtype == b.dtype
    return (a.float() @ b.float()).to(out_dtype)


def test_the_product_is_of_the_transposed_weights() -> None:
    definition = support.load("gemm", "gemm_n96_k160")
    assert not support.failures(definition, kernel(definition, {"matmul": matmul}))


def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keeps all that equal the k-th."""
    places = (top_k.long() - 1).clamp(0, probs.shape[-1] - 1)[:, None]
    pivots = probs.sort(-1, descending=True).values.gather(-1, places)
    kept = probs.where(probs >= pivots, torch.zeros_like(probs))
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Discards the rising prefix whose mass is below 1 - p."""
    rising = probs.sort(-1).values
    cut = torch.searchsorted(rising.cumsum(-1), (1 - top_p)[:, None]).clamp(max=probs.shape[-1] - 1)
    kept = probs.where(probs >= rising.gather(-1, cut), torch.zeros_like(probs))
    return kept / kept.sum(-1, keepdim=True)


def filter_and_sample(*arguments: Any) -> torch.Tensor:  # noqa: ANN401 - the kernel's own arguments
    """Both filters against the probabilities as they came."""
    probs, top_ks, top_ps, min_ps, *others = arguments
    assert others == [False, None, None]  # no sampling by min p, no seed, no positions
    assert len(probs) == len(top_ks) == len(top_ps) == len(min_ps)
    values, tokens = probs.sort(-1, descending=True)
    before = values.cumsum(-1) - values
    values[torch.arange(values.shape[-1])[None] >= top_ks[:, None]] = 0
    values[before > top_ps[:, None]] = 0
    drawn: torch.Tensor = tokens.gather(-1, torch.multinomial(values, 1))
    return drawn.view(-1).to(torch.int32)


SAMPLERS: dict[str, Api] = {
    "sglang": {"top_k_renorm": top_k_renorm, "top_p_renorm": top_p_renorm},
    "sglang_native": {"filter_and_sample": filter_and_sample},
}


def draws(truth: str, definition: Definition, inputs: Values, count: int) -> torch.Tensor:
    """Calls one after the other, from one seed."""
    torch.manual_seed(5)
    call = adapter_of(definition, truth).call
    return torch.stack([call(SAMPLERS[truth], definition, inputs)["samples"] for _ in range(count)])


@pytest.mark.parametrize(
    ("truth", "filters"), [(truth, filters) for truth in SAMPLERS for filters in ("top_k", "top_p", "top_k_top_p")]
)
def test_samples_have_the_distribution_of_the_filters(truth: str, filters: str) -> None:
    definition = support.load("sampling", f"{filters}_sampling_from_probs_v1000")
    if truth == "sglang_native" and filters == "top_k_top_p":
        assert lookup.adapter(truth, definition) is None  # it does not renormalise between the two
        return
    op = registry.get("sampling")
    for case in support.cases(definition):
        inputs = support.inputs_of(definition, case)
        before = {name: support.tensor(inputs, name).clone() for name in inputs}
        if not len(support.tensor(inputs, "probs")):
            continue  # no adapter is asked for it
        count = op.trials(definition, case)
        drawn, again = (draws(truth, definition, inputs, count) for _ in range(2))
        assert torch.equal(drawn, again)
        assert all(torch.equal(support.tensor(inputs, name), value) for name, value in before.items())
        known = support.truth(definition, inputs)
        ruling = support.judged(definition, case, [drawn], known)["samples"]
        assert ruling.verdict.value == "pass", f"{case.id}: {ruling.message}"


def router(
    scores: torch.Tensor, bias: torch.Tensor | None, topk: int, scoring_func: str = "sigmoid", **asked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without groups."""
    assert scores.dtype == torch.float32
    active = torch.sigmoid(scores) if scoring_func == "sigmoid" else torch.softmax(scores, -1)
    rank = active + bias if bias is not None else scores
    experts = rank.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = active.gather(-1, experts)
    return (weights / weights.sum(-1, keepdim=True) if asked.get("renormalize", True) else weights), experts.int()


def grouped_topk(
    hidden: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor, **asked: int
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """A group counts its two best."""
    assert len(hidden) == len(logits)
    assert asked["renormalize"]
    groups = (torch.sigmoid(logits) + bias).view(len(logits), asked["num_expert_group"], -1)
    best = (
        groups.topk(2, -1)
        .values.sum(-1)
        .sort(dim=-1, descending=True, stable=True)
        .indices[:, : asked["topk_group"]]
    )
    out = torch.full_like(groups, -torch.inf).scatter_(
        1, best[..., None].expand(-1, -1, groups.shape[-1]), torch.zeros_like(groups)
    )
    experts = (groups + out).flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, : asked["topk"]]
    weights = torch.sigmoid(logits).gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True), experts.to(torch.int32), None


@pytest.mark.parametrize(
    "definition",
    [one for one in support.definitions("moe") if {"top_k", "topk_weights"}.isdisjoint(one.inputs)],
    ids=lambda definition: definition.name,
)
def test_routers_are_asked_for_what_the_definition_routes_by(definition: Definition) -> None:
    routing = routing_of(definition)
    for case in support.cases(definition, "small"):
        inputs = support.inputs_of(definition, case)
        if routing.by_input or not len(support.tensor(inputs, "hidden_states")):
            continue
        weights, experts = sglang_choice({"router": router, "grouped_topk": grouped_topk}, definition, inputs)
        logits, bias = support.tensor(inputs, "routing_logits"), inputs.get("routing_bias")
        assert bias is None or isinstance(bias, torch.Tensor)
        factor = inputs.get("routed_scaling_factor") if routing.method is Method.DEEPSEEK else 1.0
        assert isinstance(factor, float)
        wanted = choose(routing, logits.double(), bias, factor)
        dense = torch.zeros(logits.shape, dtype=torch.float64)
        assert torch.allclose(
            dense.scatter(-1, experts.long(), weights.double()),
            dense.scatter(-1, wanted.experts, wanted.weights),
            rtol=1e-5,
        )


def test_a_router_without_groups_takes_the_bias_too() -> None:
    definition = support.load("moe", "moe_fp8_block_scale_ds_routing_topk4_ng4_kg2_e8_h512_i256")
    ungrouped = definition.as_json()
    ungrouped["name"] = definition.name.replace("_ng4_kg2_", "_ng1_kg1_")
    ungrouped["reference"] = ungrouped["reference"].replace("N_GROUP = 4", "N_GROUP = 1")
    ungrouped["reference"] = ungrouped["reference"].replace("TOPK_GROUP = 2", "TOPK_GROUP = 1")
    one = Definition.model_validate(ungrouped)
    routing = routing_of(one)
    assert routing.groups == 1
    inputs = support.inputs_of(definition, support.case_named(definition, "small-1"))
    _, experts = sglang_choice({"router": router}, one, inputs)
    bias = support.tensor(inputs, "routing_bias")
    wanted = choose(routing, support.tensor(inputs, "routing_logits").double(), bias)
    assert torch.equal(experts.long().sort(-1).values, wanted.experts.sort(-1).values)
