"""Mixtures of experts in models, and their definitions in the forms that the dataset has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from traceproof.models.kernel import Kernel, kernel
from traceproof.ops.drafts import Axes, Draft, Tensors, const, fill, scalar, tensor, var
from traceproof.ops.extraction import Extraction

if TYPE_CHECKING:
    from traceproof.models.evidence import Evidence
    from traceproof.models.reading import Module, Reading


Facts = dict[str, Any]


def _dtype(tensor: Any) -> str:  # noqa: ANN401 - a tensor or a parameter
    return str(tensor.dtype).removeprefix("torch.")


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
    dtype = _dtype(module.w13_weight) if hasattr(module, "w13_weight") else "packed"
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
        "bias": None if bias is None else _dtype(bias),
        "scaling_factor": config.routed_scaling_factor,
    }


ROUTINGS: Mapping[tuple[object, object, object], str] = {
    # (scoring, renormalised, grouped) as SGLang's top-k has them; one group is DeepSeek's form at n_group 1
    ("sigmoid", True, False): "deepseek_v3",
    ("sigmoid", True, True): "deepseek_v3",
    ("softmax", True, False): "renormalise",
    ("softmax", False, False): "softmax",
}

FP8_BLOCK = "float8_e4m3fn block 128x128"
BLOCK = 128
CONSTRAINTS = (
    "gemm1_weights.shape[1] == 2 * intermediate_size",
    "gemm2_weights.shape[1] == hidden_size",
    "gemm2_weights.shape[2] == intermediate_size",
)


def moe(call: Kernel) -> Draft | str:
    """The definition of a mixture, or why the dataset has no form for it."""
    facts = dict(call.facts)
    hidden, intermediate = call["hidden"], call["intermediate"]
    match facts["quantisation"], facts["routing"]:
        case _, "softmax":
            return (
                "softmax weights that are not renormalised over the chosen experts: the dataset has no such form"
            )
        case str(kind), _ if kind == FP8_BLOCK and (hidden % BLOCK or intermediate % BLOCK):
            return f"hidden {hidden} or intermediate {intermediate} per rank is no multiple of the block, {BLOCK}"
        case str(kind), "deepseek_v3" if kind == FP8_BLOCK:
            return _deepseek(call)
        case str(kind), "renormalise" if kind == FP8_BLOCK:
            return _renormalise(call, fp8=True)
        case "bfloat16", "renormalise":
            return _renormalise(call, fp8=False)
        case kind, routing:
            return f"{kind} weights with {routing} routing: the dataset has no such form"


def _sizes(hidden: int, intermediate: int) -> Axes:
    return {
        "hidden_size": const(hidden, "Hidden dimension size."),
        "intermediate_size": const(intermediate, "Intermediate size of an expert on one rank."),
        "gemm1_out_size": const(2 * intermediate, "Rows of gemm1: up and gate, 2 * intermediate_size."),
    }


def _blocks(hidden: int, intermediate: int) -> Axes:
    return {
        "num_hidden_blocks": const(hidden // BLOCK, "Blocks of 128 along hidden_size."),
        "num_intermediate_blocks": const(intermediate // BLOCK, "Blocks of 128 along intermediate_size."),
        "num_gemm1_out_blocks": const(2 * intermediate // BLOCK, "Blocks of 128 along gemm1_out_size."),
    }


def _fp8_data() -> Tensors:
    experts = "num_local_experts"
    return {
        "hidden_states": tensor("seq_len hidden_size", "float8_e4m3fn", "Tokens, quantised to FP8."),
        "hidden_states_scale": tensor("num_hidden_blocks seq_len", "float32", "Scale of each 1 x 128 of a token."),
        "gemm1_weights": tensor(
            f"{experts} gemm1_out_size hidden_size", "float8_e4m3fn", "First GEMM: up rows, then gate rows."
        ),
        "gemm1_weights_scale": tensor(
            f"{experts} num_gemm1_out_blocks num_hidden_blocks", "float32", "Scale of each 128 x 128 of gemm1."
        ),
        "gemm2_weights": tensor(
            f"{experts} hidden_size intermediate_size", "float8_e4m3fn", "Second GEMM (down)."
        ),
        "gemm2_weights_scale": tensor(
            f"{experts} num_hidden_blocks num_intermediate_blocks", "float32", "Scale of each 128 x 128 of gemm2."
        ),
    }


OUTPUT = {"output": tensor("seq_len hidden_size", "bfloat16", "Weighted sum of the experts here.")}
TOKENS = var("Number of tokens.")
# Twins keep what decides behaviour (groups, top-k against experts, offset) and shrink the matrices.
TWIN_HIDDEN, TWIN_INTERMEDIATE = 256, 128


def _deepseek(call: Kernel, *, twin: bool = False) -> Draft:
    experts, local, top_k = call["experts"], call["local_experts"], call["top_k"]
    groups, kept = call["groups"], call["kept_groups"]
    hidden = TWIN_HIDDEN if twin else call["hidden"]
    intermediate = TWIN_INTERMEDIATE if twin else call["intermediate"]
    axes: Axes = {
        "seq_len": TOKENS,
        "num_experts": const(experts, "Total number of experts."),
        "num_local_experts": const(local, "Experts on one rank."),
        **_sizes(hidden, intermediate),
        "top_k": const(top_k, "Experts a token goes to."),
        **_blocks(hidden, intermediate),
    }
    inputs: Tensors = {
        "routing_logits": tensor("seq_len num_experts", "float32", "Router's logits."),
        "routing_bias": tensor("num_experts", "bfloat16", "Added to the scores for the choice; zeros for none."),
        **_fp8_data(),
        "local_expert_offset": scalar("int32", "First expert on this rank."),
        "routed_scaling_factor": scalar("float32", "Factor of the routing weights."),
    }
    constants = {"num_experts": experts, "num_local_experts": local, "top_k": top_k, "n_group": groups}
    constants |= {"topk_group": kept, "hidden_size": hidden, "intermediate_size": intermediate}
    name = f"topk{top_k}_ng{groups}_kg{kept}_e{local}_h{hidden}_i{intermediate}"
    return Draft(
        name=f"moe_fp8_block_scale_ds_routing_{name}",
        description=(
            f"FP8 block scale mixture of experts with DeepSeek-V3 routing (n_group={groups}, topk_group={kept}); "
            "routed experts only."
        ),
        axes=axes,
        constraints=CONSTRAINTS,
        inputs=inputs,
        outputs=OUTPUT,
        filled=fill(__package__, "moe_fp8_ds_routing", **constants),
        fi_api="fused_moe.trtllm_fp8_block_scale_moe",
        quantisation="float8_e4m3fn",
        tp=True,
        ep=True,
        twin=None if twin else _deepseek(call, twin=True),
    )


def _renormalise(call: Kernel, *, fp8: bool, twin: bool = False) -> Draft:
    local, top_k = call["local_experts"], call["top_k"]
    hidden = TWIN_HIDDEN if twin else call["hidden"]
    intermediate = TWIN_INTERMEDIATE if twin else call["intermediate"]
    axes: Axes = {
        "seq_len": TOKENS,
        "num_local_experts": const(local, "Experts on one rank."),
        **_sizes(hidden, intermediate),
        "top_k": const(top_k, "Experts a token goes to."),
        **(_blocks(hidden, intermediate) if fp8 else {}),
    }
    logits = tensor("seq_len num_local_experts", "bfloat16", "Router's logits over the experts here.")
    experts = "num_local_experts"
    plain = {
        "hidden_states": tensor("seq_len hidden_size", "bfloat16", "Tokens."),
        "gemm1_weights": tensor(
            f"{experts} gemm1_out_size hidden_size", "bfloat16", "First GEMM: up rows, then gate rows."
        ),
        "gemm2_weights": tensor(f"{experts} hidden_size intermediate_size", "bfloat16", "Second GEMM (down)."),
    }
    constants = {"num_local_experts": local, "hidden_size": hidden, "intermediate_size": intermediate}
    kind = "fp8_block_scale" if fp8 else "bf16"
    note = ""
    if call["experts"] != local:
        note = f" A rank holds {local} of {call['experts']} experts; the form routes over those alone."
    return Draft(
        name=f"moe_{kind}_renorm_topk{top_k}_e{local}_h{hidden}_i{intermediate}",
        description=(
            f"{'FP8 block scale' if fp8 else 'Bfloat16'} mixture of experts, weights renormalised over the "
            f"chosen; routed experts only.{note}"
        ),
        axes=axes,
        constraints=CONSTRAINTS,
        inputs={"routing_logits": logits, **(_fp8_data() if fp8 else plain)},
        outputs=OUTPUT,
        filled=fill(__package__, "moe_fp8_renorm" if fp8 else "moe_bf16_renorm", top_k=top_k, **constants),
        fi_api="fused_moe." + ("trtllm_fp8_block_scale_moe" if fp8 else "trtllm_bf16_moe"),
        quantisation="float8_e4m3fn" if fp8 else None,
        tp=True,
        ep=True,
        twin=None if twin else _renormalise(call, fp8=fp8, twin=True),
    )


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
    names = ("experts", "local_experts", "hidden", "intermediate", "quantisation")
    return kernel(
        "experts",
        count=module.count,
        path=module.path,
        routing=routing,
        top_k=chosen["top_k"],
        groups=chosen["groups"] or 1,
        kept_groups=chosen["kept_groups"] or 1,
        **{name: facts[name] for name in names},
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


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    tp, ep = evidence.parallel.tp, evidence.parallel.ep

    def terms(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        grouped = facts.get("groups", 1) > 1
        routing = ROUTINGS.get((facts.get("scoring"), facts.get("renormalise"), grouped))
        return {
            "experts": facts["experts"],
            "local_experts": facts["experts"] // ep,
            "hidden": facts["hidden"],
            "intermediate": facts["intermediate"] // max(1, tp // ep),
            "gated": facts["gated"],
            "routing": routing,
            "quantisation": _quantisation(evidence.config),
            **{name: facts.get(name) for name in ("top_k", "groups", "kept_groups")},
        }

    return evidence.differs(call, "experts", terms, gated=True)


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
    differs={"experts": _differs},
    drafts={"experts": lambda call, _: [moe(call)]},
)
