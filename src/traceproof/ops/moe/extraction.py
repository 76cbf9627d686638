"""Mixtures of experts in models: what they do, and which of their calls the dataset has a form for."""

from collections.abc import Mapping
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module, Reading
from traceproof.ops.extraction import Extraction, Facts, call_of, dtype_name, held_against
from traceproof.ops.moe.drafts import moe

BESIDE = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")  # numbers of an activation that is more than silu


def _experts(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    runner = module.moe_runner_config
    beside = [name for name in BESIDE if getattr(runner, name, None) is not None]
    beside += ["bias"] * any(name.endswith("_bias") for name, _ in module.named_parameters(recurse=False))
    own: Facts = {"beside": ", ".join(beside)} if beside else {}
    return own | {
        "experts": module.num_experts,
        "local_experts": module.num_local_experts,
        "shared_fused": module.num_fused_shared_experts,
        "top_k": module.top_k,
        "hidden": module.hidden_size,
        "intermediate": module.intermediate_size_per_partition,
        "routing": getattr(module.routing_method_type, "name", None),
        "gate": runner.activation,
        "gated": runner.is_gated,
        "scaling_factor": runner.routed_scaling_factor,
        "quantisation": _expert_quantisation(module),
    }


def _expert_quantisation(module: Any) -> str:  # noqa: ANN401
    config = getattr(module, "quant_config", None)
    dtype = dtype_name(module.w13_weight) if hasattr(module, "w13_weight") else "packed"
    block = getattr(config, "weight_block_size", None)
    if dtype == "float8_e4m3fn" and block:
        return f"float8_e4m3fn block {block[0]}x{block[1]}"
    if config is not None:
        return f"{dtype} {type(config).__name__}"
    return dtype


def _top_k(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    config = module.topk_config
    bias = config.correction_bias
    return {
        "top_k": config.top_k,
        "grouped": config.use_grouped_topk,
        "groups": config.num_expert_group,
        "kept_groups": config.topk_group,
        "renormalise": config.renormalize,
        "scoring": config.scoring_func,
        "own": config.custom_routing_function is not None,
        "bias": None if bias is None else dtype_name(bias),
        "scaling_factor": config.routed_scaling_factor,
    }


ROUTINGS: Mapping[tuple[object, object, object], str] = {
    # (scoring, renormalised, grouped) as SGLang's top-k has them; one group is DeepSeek's form at n_group 1
    ("sigmoid", True, False): "deepseek_v3",
    ("sigmoid", True, True): "deepseek_v3",
    ("softmax", True, False): "renormalise",
    ("softmax", False, False): "softmax",
}


def _call(module: Module, reading: Reading) -> Kernel | str:
    facts = module.facts
    beside = (module.parent, module.parent_class)
    routers = [one for one in reading.modules if one.kind == "top_k" and (one.parent, one.parent_class) == beside]
    if not routers:
        return "its router has no top-k beside it, so the routing is not known"
    chosen = routers[-1].facts
    grouped = bool(chosen["grouped"]) and (chosen["groups"] or 1) > 1
    routing = ROUTINGS.get((_scoring(chosen), chosen["renormalise"], grouped))
    if without := _formless(facts, chosen, routing):
        return f"experts with {without}"
    return call_of(
        module,
        "experts",
        *("experts", "local_experts", "hidden", "intermediate", "quantisation"),
        routing=routing,
        top_k=chosen["top_k"],
        groups=chosen["groups"] or 1,
        kept_groups=chosen["kept_groups"] or 1,
    )


def _formless(facts: Mapping[str, Any], chosen: Mapping[str, Any], routing: str | None) -> str | None:
    """What of these experts, or of their router, no form can say."""
    if chosen["own"]:
        return "routing by a function of the model's own: no form"
    if routing is None:
        return f"routing by {_scoring(chosen)}, renormalised {chosen['renormalise']}: no form"
    if routing == "renormalise" and chosen["bias"]:
        return "routing by softmax and a bias: no form"
    if "beside" in facts:
        return f"more than silu: {facts['beside']}, which no form can say"
    if not facts["gated"] or facts["gate"] != "silu":
        return f"activation {facts['gate']}, gated {facts['gated']}: no form"
    return f"weights packed by {facts['scheme']}: no form" if "scheme" in facts else None


def _scoring(facts: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """SGLang's choice within groups takes a bias with sigmoid scores alone, whatever the scores are called."""
    return "sigmoid" if facts["grouped"] and facts["bias"] else facts["scoring"]


def _routing(module: Module, _: Reading) -> str:
    """The kernel that chooses experts, which the dataset has within that of the experts alone."""
    facts = module.facts
    if facts["own"]:
        return "routing by a function of the model's own: no op_type"
    parts = [f"routing by {_scoring(facts)}", "renormalised" if facts["renormalise"] else "not renormalised"]
    parts += ["within groups"] * (bool(facts["grouped"]) and (facts["groups"] or 1) > 1)
    parts += ["with a bias"] * bool(facts["bias"])
    return f"{', '.join(parts)}: no op_type"


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    tp, ep, grouped = evidence.parallel.tp, evidence.parallel.ep, facts.get("groups", 1) > 1
    return {
        "experts": facts["experts"],
        "local_experts": facts["experts"] // ep,
        "hidden": facts["hidden"],
        "intermediate": facts["intermediate"] // max(1, tp // ep),
        "gated": facts["gated"],
        "routing": ROUTINGS.get((facts.get("scoring"), facts.get("renormalise"), grouped)),
        "quantisation": _quantisation(evidence.config),
        **{name: facts.get(name) for name in ("top_k", "groups", "kept_groups")},
    }


def _quantisation(config: Mapping[str, Any]) -> str:
    """By config.json: transformers' model holds no weights, so none that are quantised."""
    given = config.get("quantization_config") or {}
    block = given.get("weight_block_size")
    if given.get("quant_method") == "fp8" and block:
        return f"float8_e4m3fn block {block[0]}x{block[1]}"
    if given:
        return f"packed {given.get('quant_method')}"
    return str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")


EXTRACTION = Extraction(
    readers={"FusedMoE": ("experts", _experts), "TopK": ("top_k", _top_k)},
    calls={"experts": _call, "top_k": _routing},
    differs={"experts": held_against("experts", _terms, gated=True)},
    drafts={"experts": lambda call, _: [moe(call)]},
)
