"""A laid-out model, module by module, as plain facts: what it is, its shapes on this rank, how often it occurs.

Classes are recognised by the names in their inheritance (SGLang's own layers), so that a model's subclass of a
layer counts as that layer. Everything else is a `block`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

Facts = dict[str, Any]
LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def describe(model: nn.Module) -> list[dict[str, Any]]:
    """Every module once per (path with layer numbers starred, holder's class, class, facts), with its count.

    In model order. Shared instances (rotary embeddings) count at each place that holds them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, dict[str, Any]] = {}
    for path, module in modules.items():
        if ".quant_method" in path:
            continue  # how a layer multiplies, not a layer
        parent = path.rpartition(".")[0]
        holder = modules[parent] if path else None
        kind, facts = classify(module, holder)
        entry = {
            "path": LAYER_INDEX.sub("*", path),
            "parent": LAYER_INDEX.sub("*", parent) if path else None,
            "parent_class": type(holder).__name__ if holder is not None else None,
            "class": type(module).__name__,
            "kind": kind,
            "facts": facts,
        }
        key = repr(entry)
        found.setdefault(key, entry | {"count": 0, "first": path})["count"] += 1
    return list(found.values())


def classify(module: nn.Module, parent: nn.Module | None) -> tuple[str, Facts]:
    """Kind and facts of one module; `parent` helps where a layer leaves its context to whoever holds it."""
    for ancestor in type(module).__mro__:
        if ancestor.__name__ in READERS:
            kind, reader = READERS[ancestor.__name__]
            return kind, reader(module, parent)
    if type(module).__name__.startswith(("SiluAndMul", "GeluAndMul", "ReLU2")):
        return "activation", {}
    return "block", {}


def _dtype(tensor: Any) -> str:  # noqa: ANN401 - a tensor or a parameter
    return str(tensor.dtype).removeprefix("torch.")


def _norm(variant: str) -> Callable[[Any, Any], Facts]:
    def read(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        weight = module.weight
        return {
            "variant": variant,
            "hidden": weight.shape[0] if weight is not None else 0,
            "eps": eps,
            "dtype": _dtype(weight),
        }

    return read


def _linear(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    rows, *columns = module.weight.shape
    facts: Facts = {
        "dtype": _dtype(module.weight),
        "rank_n": rows,
        "rank_k": columns[-1],
        "conv": len(columns) > 1,
    }
    facts["full_n"] = getattr(module, "output_size", rows)
    facts["full_k"] = getattr(module, "input_size", columns[-1])
    if hasattr(module, "total_num_kv_heads"):
        # With more ranks than KV heads each rank holds a copy, and output_size counts the copies.
        queries = module.total_num_heads * module.head_size
        keys_values = module.total_num_kv_heads * (module.head_size + module.v_head_size)
        facts["full_n"] = queries + keys_values
    return facts


def _attention(module: Any, parent: Any) -> Facts:  # noqa: ANN401
    facts = {
        "heads": module.tp_q_head_num,
        "kv_heads": module.tp_k_head_num,
        "qk_dim": module.qk_head_dim,
        "vo_dim": module.v_head_dim,
        "scale": module.scaling,
        "window": module.sliding_window_size,
        "logit_cap": module.logit_cap,
    }
    rank, rope = getattr(parent, "kv_lora_rank", None), getattr(parent, "qk_rope_head_dim", None)
    if rank is not None and rope is not None:
        facts |= {"kv_lora_rank": rank, "rope_dim": rope, "absorbed": module.v_head_dim == rank}
    if getattr(parent, "use_dsa", False):
        facts["sparse"] = True
    return facts


def _delta_net(module: Any, parent: Any) -> Facts:  # noqa: ANN401
    if not hasattr(parent, "A_log"):
        return {"form": type(parent).__name__}
    return {
        "form": "gated_delta_net",
        "q_heads": module.num_q_heads,
        "k_heads": module.num_k_heads,
        "v_heads": module.num_v_heads,
        "k_dim": module.head_k_dim,
        "v_dim": module.head_v_dim,
        "dt_bias_dtype": _dtype(parent.dt_bias),
    }


def _mamba(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    heads = module.A.shape[0]
    channels = module.conv1d.weight.shape[0]  # x, B and C go through the convolution together
    groups = (channels - heads * module.head_dim) // (2 * module.ssm_state_size)
    return {
        "heads": heads,
        "head_dim": module.head_dim,
        "state": module.ssm_state_size,
        "groups": groups,
        "norm_groups": module.n_groups,
    }


def _experts(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    runner = module.moe_runner_config
    return {
        "experts": module.num_experts,
        "local_experts": module.num_local_experts,
        "shared_fused": module.num_fused_shared_experts,
        "top_k": module.top_k,
        "hidden": module.hidden_size,
        "intermediate": module.intermediate_size_per_partition,
        "routing": getattr(module.routing_method_type, "name", None),
        "activation": runner.activation,
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
        "bias": None if bias is None else _dtype(bias),
        "scaling_factor": config.routed_scaling_factor,
    }


def _rope(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    return {
        "head_dim": module.head_size,
        "rotary_dim": module.rotary_dim,
        "style": "neox" if module.is_neox_style else "gptj",
        "class": type(module).__name__,
    }


def _embedding(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    return {"vocab": module.org_vocab_size, "hidden": module.embedding_dim}


READERS: Mapping[str, tuple[str, Callable[[Any, Any], Facts]]] = MappingProxyType(
    {
        "GemmaRMSNorm": ("norm", _norm("gemma")),
        "Gemma3RMSNorm": ("norm", _norm("gemma")),
        "RMSNorm": ("norm", _norm("plain")),
        "FusedRMSNormGated": ("norm", _norm("gated")),
        "Mixer2RMSNormGated": ("norm", _norm("gated")),
        "LayerNorm": ("norm", _norm("layer")),
        "ParallelLMHead": ("lm_head", _embedding),
        "VocabParallelEmbedding": ("embedding", _embedding),
        "LinearBase": ("linear", _linear),
        "Linear": ("linear", _linear),
        "MoEGate": ("linear", _linear),
        "RadixAttention": ("attention", _attention),
        "RadixLinearAttention": ("linear_attention", _delta_net),
        "MambaMixer2": ("mamba", _mamba),
        "FusedMoE": ("experts", _experts),
        "TopK": ("top_k", _top_k),
        "RotaryEmbedding": ("rope", _rope),
    }
)
