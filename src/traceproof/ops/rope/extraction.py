"""Rotary embeddings in models, and their definitions."""

from collections.abc import Mapping
from typing import Any

from traceproof.models.reading import Evidence, Kernel
from traceproof.ops.drafts import Draft, draft
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
    pairs = "channel i with channel i + rotary_dim / 2" if call["style"] == "neox" else "neighbouring channels"
    return draft(__package__, "rope", {**dict(call.facts), "pairs": pairs})


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
