"""What must hold among a config.json's fields, and between them and the parallelism, before a model is read."""

from collections.abc import Mapping
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.extract.config_json import Fields
from traceproof.models.catalogue import Parallel

# What config.json files call the same number.
HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads",)
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config")


def language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is of its language model: all of it, but for models of several modalities."""
    for name in LANGUAGE:
        inner = config.get(name)
        if isinstance(inner, dict):
            return language(inner)
    return config


def check(config: Mapping[str, Any], parallel: Parallel, *, where: str) -> None:
    """Refuse a config.json that lacks what decides a model's shape, or that the parallelism does not fit.

    SGLang and transformers fill in what is missing, both alike, so that only this sees it. Raises TraceproofError:
    fields are missing or impossible; all at once.
    """
    fields = Fields(language(config))
    for names in (HIDDEN, LAYERS, ("vocab_size",)):
        fields.count(names)
    heads, kv_heads = fields.count(HEADS), fields.count(KV_HEADS, needed=False)
    ranks = parallel.attention
    fields.divides("tp", ranks, HEADS, heads)
    if kv_heads is not None and heads is not None:
        fields.divides("num_key_value_heads", kv_heads, HEADS, heads)
        if kv_heads % ranks and ranks % kv_heads:
            told = f"tp: {ranks} neither divides num_key_value_heads = {kv_heads} nor is a multiple of it"
            fields.problems.append(told)
    experts, chosen = fields.count(EXPERTS, needed=False), fields.count(CHOSEN, needed=False)
    fields.divides("ep", parallel.ep, EXPERTS, experts)
    if experts is not None and chosen is not None and chosen > experts:
        fields.problems.append(
            f"{fields.named(CHOSEN)}: {chosen}; allowed: 1 to {fields.named(EXPERTS)} = {experts}"
        )
    for name in EPSILONS:
        fields.positive(name)
    if fields.problems:
        problems = list(dict.fromkeys(fields.problems))
        raise TraceproofError(f"{where} cannot be read", problems=problems, todo="Correct the fields named.")
