"""SGLang's adapters for products, samplers and routers, with kernels that PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_support as support
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import lookup, registry
from traceproof.ops.adapter import Adapter
from traceproof.ops.base import Values
from traceproof.ops.families.expert import sglang_choice
from traceproof.ops.families.routing import Method, choose, routing_of

Api = dict[str, Callable[..., Any]]

pytestmark = pytest.mark.usefixtures("one_thread")


def adapter_of(truth: str, definition: Definition) -> Adapter:
    """A ground truth's adapter for a definition."""
    found = lookup.adapter(truth, definition)
    assert found is not None
    return found


def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """[M, K] by [K, N], summed in float32."""
    assert a.shape[1] == b.shape[0]
    assert a.dtype == b.dtype
    return (a.float() @ b.float()).to(out_dtype)


def test_the_product_is_of_the_transposed_weights() -> None:
    definition = support.load("gemm", "gemm_n96_k160")
    adapter = adapter_of("sglang", definition)

    def run(_: Definition, inputs: Values) -> list[torch.Tensor]:
        outputs = adapter.empty(definition, inputs)
        outputs = adapter.call({"matmul": matmul}, definition, inputs) if outputs is None else outputs
        return [outputs["C"]]

    assert not support.failures(definition, run)


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


def filter_and_sample(  # noqa: PLR0913, PLR0917 - the function's own arguments
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,  # noqa: FBT001
    sampling_seed: None,
    positions: None,
) -> torch.Tensor:
    """Both filters against the probabilities as they came."""
    assert sampling_seed is positions is None
    assert not need_min_p_sampling
    assert len(probs) == len(top_ks) == len(top_ps) == len(min_ps)
    values, tokens = probs.sort(-1, descending=True)
    before = values.cumsum(-1) - values
    values[torch.arange(values.shape[-1])[None] >= top_ks[:, None]] = 0
    values[before > top_ps[:, None]] = 0
    return tokens.gather(-1, torch.multinomial(values, 1)).view(-1).to(torch.int32)


SAMPLERS: dict[str, Api] = {
    "sglang": {"top_k_renorm": top_k_renorm, "top_p_renorm": top_p_renorm},
    "sglang_native": {"filter_and_sample": filter_and_sample},
}


def draws(truth: str, definition: Definition, inputs: Values, count: int) -> torch.Tensor:
    """Calls one after the other, from one seed."""
    torch.manual_seed(5)
    call = adapter_of(truth, definition).call
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
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    topk: int,
    scoring_func: str = "sigmoid",
    *,
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without groups."""
    assert scores.dtype == torch.float32
    active = torch.sigmoid(scores) if scoring_func == "sigmoid" else torch.softmax(scores, -1)
    rank = active + bias if bias is not None else scores
    experts = rank.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = active.gather(-1, experts)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), experts.to(torch.int32)


def grouped_topk(  # noqa: PLR0913 - the function's own arguments
    hidden: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """A group counts its two best."""
    assert len(hidden) == len(logits)
    assert renormalize
    groups = (torch.sigmoid(logits) + bias).view(len(logits), num_expert_group, -1)
    best = groups.topk(2, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
    out = torch.full_like(groups, -torch.inf).scatter_(
        1, best[..., None].expand(-1, -1, groups.shape[-1]), torch.zeros_like(groups)
    )
    experts = (groups + out).flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = torch.sigmoid(logits).gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True), experts.to(torch.int32), None


@pytest.mark.parametrize("definition", support.definitions("moe"), ids=lambda definition: definition.name)
def test_routers_are_asked_for_what_the_definition_routes_by(definition: Definition) -> None:
    routing = routing_of(definition)
    for case in support.cases(definition, "small"):
        inputs = support.inputs_of(definition, case)
        if routing.given or not len(support.tensor(inputs, "hidden_states")):
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
    definition = next(one for one in support.definitions("moe") if routing_of(one).method is Method.DEEPSEEK)
    assert routing_of(definition).groups > 1
    ungrouped = definition.as_json()
    assert "_ng4_kg2_" in definition.name
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
