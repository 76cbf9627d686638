"""Grouped-query attention in models, and its definitions over a paged cache."""

from collections.abc import Mapping
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module, Reading
from traceproof.ops.common import attention_extraction as attention
from traceproof.ops.extraction import Extraction


def _call(module: Module, _: Reading) -> Kernel | str | None:
    if "kv_lora_rank" in module.facts:
        return None
    return attention.called(module, "gqa", heads="heads", kv_heads="kv_heads", dim="qk_dim")


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    tp = evidence.parallel.attention

    def terms(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        kv_heads = max(1, facts["kv_heads"] // tp)  # with more ranks than KV heads, ranks hold copies
        sizes = {"heads": facts["heads"] // tp, "kv_heads": kv_heads, "dim": facts["qk_dim"]}
        return sizes | {"vo_dim": facts["vo_dim"]} | attention.plain(facts)

    return evidence.differs(call, "attention", terms, vo_dim=call["dim"], **attention.PLAIN)


EXTRACTION = Extraction(
    readers=attention.READERS,
    calls={"attention": _call},
    differs={"gqa": _differs},
    drafts={"gqa": attention.paged(__package__, "gqa_paged")},
)
