"""Multi-head latent attention before absorption, over ragged keys and values."""

from collections.abc import Mapping
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module, Reading
from traceproof.ops.common import attention_extraction as attention
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Extraction, Facts, held_against


def mla_ragged(call: Kernel) -> Draft:
    """MLA before absorption: full keys and values per head."""
    heads, qk, vo = call["heads"], call["qk"], call["vo"]
    sizes = {"num_qo_heads": heads, "num_kv_heads": heads, "qk_dim": qk, "vo_dim": vo}
    return draft(__package__, "mla_ragged", sizes)


def _call(module: Module, _: Reading) -> Kernel | str | None:
    if "kv_lora_rank" not in module.facts or module.facts.get("absorbed"):
        return None
    return attention.called(module, "mla_ragged", heads="heads", qk="qk_dim", vo="vo_dim")


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    heads = facts["heads"] // evidence.parallel.attention
    return {"heads": heads, "qk": facts["qk_dim"], "vo": facts["vo_dim"]} | attention.plain(facts)


EXTRACTION = Extraction(
    readers=attention.READERS,
    calls={"attention": _call},
    differs={"mla_ragged": held_against("attention", _terms, **attention.PLAIN)},
    drafts={"mla_ragged": lambda call, _: [mla_ragged(call)]},
)
