"""Rotary embeddings in models, and their definitions."""

from collections.abc import Mapping
from typing import Any

from traceproof.models.evidence import Evidence
from traceproof.models.kernel import Kernel
from traceproof.ops.drafts import Draft, const, fill, tensor, var
from traceproof.ops.extraction import Extraction, Facts, call_of, held_against


def _rope(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
    return {
        "head_dim": module.head_size,
        "rotary_dim": module.rotary_dim,
        "style": "neox" if module.is_neox_style else "gptj",
        "class": type(module).__name__,
    }


def rope(call: Kernel) -> Draft:
    """Rotary embedding from a cache of cosines and sines."""
    head, rotary, style = call["head_dim"], call["rotary_dim"], call["style"]
    pairs = "channel i with channel i + rotary_dim / 2" if style == "neox" else "neighbouring channels"
    return Draft(
        name=f"rope_with_cos_sin_cache_{style}_style_d{head}_rd{rotary}",
        description=f"Rotary embedding of q and k, rotating {pairs} of the first {rotary} of {head} channels.",
        axes={
            "num_tokens": var("Number of tokens."),
            "num_qo_heads": var("Number of query heads."),
            "num_kv_heads": var("Number of key heads."),
            "head_size": const(head, "Channels of a head."),
            "rotary_dim": const(rotary, "Channels that are rotated."),
            "max_seq_len": var("Positions in the cache."),
        },
        inputs={
            "q": tensor("num_tokens num_qo_heads head_size", "bfloat16", "Queries."),
            "k": tensor("num_tokens num_kv_heads head_size", "bfloat16", "Keys."),
            "cos_sin_cache": tensor("max_seq_len rotary_dim", "float32", "A position's cosines, then its sines."),
            "positions": tensor("num_tokens", "int64", "Position of each token."),
        },
        outputs={
            "q_out": tensor("num_tokens num_qo_heads head_size", "bfloat16", "Rotated queries."),
            "k_out": tensor("num_tokens num_kv_heads head_size", "bfloat16", "Rotated keys."),
        },
        filled=fill(__package__, f"rope_{style}", head_size=head, rotary_dim=rotary),
        fi_api="rope.apply_rope_with_cos_sin_cache_inplace",
    )


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    stored = facts["style"]
    loaded = "neox" if stored == "gptj" and "rotary halves" in evidence.loads else stored
    return {"rotary_dim": facts["rotary_dim"], "style": loaded}


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    """A function of transformers is given a head, or those of its channels alone that it turns."""
    wrong = held_against("rotary", _terms, counted=False)(call, evidence)
    heads = {module.facts["head_dim"] for module in evidence.of("rotary")}
    heads |= {module.facts["qk_dim"] for module in evidence.of("attention")}
    if wrong is None and call["head_dim"] not in heads:
        return f"head_dim: SGLang {call['head_dim']}, transformers {sorted(heads)}"
    return wrong


EXTRACTION = Extraction(
    readers={"RotaryEmbedding": ("rope", _rope)},
    calls={"rope": lambda module, _: call_of(module, "rotary", "head_dim", "rotary_dim", "style")},
    differs={"rotary": _differs},
    drafts={"rotary": lambda call, _: [rope(call)]},
)
