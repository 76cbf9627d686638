"""Definitions of mixtures of experts that a model runs, in the forms that the dataset has."""

from traceproof.models.kernel import Kernel
from traceproof.ops.drafts import Axes, Draft, Tensors, const, fill, scalar, tensor, var

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


def _matrices(call: Kernel, *, twin: bool) -> tuple[int, int]:
    """Hidden and intermediate size."""
    return (TWIN_HIDDEN, TWIN_INTERMEDIATE) if twin else (call["hidden"], call["intermediate"])


def _axes(call: Kernel, hidden: int, intermediate: int, total: Axes) -> Axes:
    return {
        "seq_len": TOKENS,
        **total,
        "num_local_experts": const(call["local_experts"], "Experts on one rank."),
        **_sizes(hidden, intermediate),
        "top_k": const(call["top_k"], "Experts a token goes to."),
    }


def _deepseek(call: Kernel, *, twin: bool = False) -> Draft:
    experts, local, top_k = call["experts"], call["local_experts"], call["top_k"]
    groups, kept = call["groups"], call["kept_groups"]
    hidden, intermediate = _matrices(call, twin=twin)
    total: Axes = {"num_experts": const(experts, "Total number of experts.")}
    axes = _axes(call, hidden, intermediate, total) | _blocks(hidden, intermediate)
    inputs: Tensors = {
        "routing_logits": tensor("seq_len num_experts", "float32", "Router's logits."),
        "routing_bias": tensor("num_experts", "bfloat16", "Added to the scores for the choice; zeros for none."),
        **_fp8_data(),
        "local_expert_offset": scalar("int32", "First expert on this rank."),
        "routed_scaling_factor": scalar("float32", "Factor of the routing weights."),
    }
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
        filled=fill(__package__, "moe_fp8_ds_routing", top_k=top_k, n_group=groups, topk_group=kept),
        fi_api="fused_moe.trtllm_fp8_block_scale_moe",
        quantisation="float8_e4m3fn",
        tp=True,
        ep=True,
        twin=None if twin else _deepseek(call, twin=True),
    )


def _renormalise(call: Kernel, *, fp8: bool, twin: bool = False) -> Draft:
    local, top_k = call["local_experts"], call["top_k"]
    hidden, intermediate = _matrices(call, twin=twin)
    axes = _axes(call, hidden, intermediate, {}) | (_blocks(hidden, intermediate) if fp8 else {})
    logits = tensor("seq_len num_local_experts", "bfloat16", "Router's logits over the experts here.")
    experts = "num_local_experts"
    plain = {
        "hidden_states": tensor("seq_len hidden_size", "bfloat16", "Tokens."),
        "gemm1_weights": tensor(
            f"{experts} gemm1_out_size hidden_size", "bfloat16", "First GEMM: up rows, then gate rows."
        ),
        "gemm2_weights": tensor(f"{experts} hidden_size intermediate_size", "bfloat16", "Second GEMM (down)."),
    }
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
        filled=fill(__package__, "moe_fp8_renorm" if fp8 else "moe_bf16_renorm", top_k=top_k),
        fi_api="fused_moe." + ("trtllm_fp8_block_scale_moe" if fp8 else "trtllm_bf16_moe"),
        quantisation="float8_e4m3fn" if fp8 else None,
        tp=True,
        ep=True,
        twin=None if twin else _renormalise(call, fp8=fp8, twin=True),
    )
