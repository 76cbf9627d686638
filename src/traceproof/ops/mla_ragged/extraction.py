"""Multi-head latent attention before absorption, over ragged keys and values."""

from collections.abc import Mapping
from typing import Any

from traceproof.models.evidence import Evidence
from traceproof.models.kernel import Kernel
from traceproof.models.reading import Module, Reading
from traceproof.ops.common import attention_extraction as attention
from traceproof.ops.drafts import Draft, const, fill
from traceproof.ops.extraction import Extraction, Facts, held_against


def mla_ragged(call: Kernel) -> Draft:
    """MLA before absorption: full keys and values per head."""
    heads, qk, vo = call["heads"], call["qk"], call["vo"]
    axes = {
        "num_qo_heads": const(heads, "Number of query heads on one rank."),
        "num_kv_heads": const(heads, "Number of key and value heads on one rank."),
        "qk_dim": const(qk, "Channels of a query or key head, the rotated ones included."),
        "vo_dim": const(vo, "Channels of a value head."),
        "total_q": attention.RAGGED_AXES["total_q"],
        "total_kv": attention.RAGGED_AXES["total_kv"],
        "len_indptr": attention.LEN_INDPTR,
    }
    return Draft(
        name=f"mla_ragged_prefill_causal_h{heads}_qk{qk}_vo{vo}",
        description="Batched multi-head latent attention prefill over ragged inputs, not absorbed, causal.",
        axes=axes,
        constraints=attention.RAGGED_CONSTRAINTS,
        inputs=attention.ragged("qk_dim", "vo_dim"),
        outputs=attention.outputs("total_q", "vo_dim"),
        filled=fill(__package__, "ragged_prefill", num_qo_heads=heads, num_kv_heads=heads, qk_dim=qk, vo_dim=vo),
        stage="prefill",
        fi_api=attention.RAGGED,
        tp=True,
    )


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
