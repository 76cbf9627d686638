"""DeepSeek's sparse attention in models: the indexer, and absorbed attention over what it names."""

from collections.abc import Iterator
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module, Reading
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Choice, Extraction, Facts, call_of, held_against
from traceproof.ops.families.attention import against_latent

PAGED = 64  # tokens of a page of the indexer's cache: DeepGEMM has no other
SCALE_BYTES = 4


def _indexer(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    return {"heads": module.n_heads, "dim": module.head_dim, "topk": module.index_topk}


def _sparse_attention(call: Kernel, choice: Choice) -> Iterator[Draft]:
    """Absorbed attention over listed entries of the cache, one list per token."""
    for page_size in choice.page_sizes:
        yield draft(__package__, "dsa_sparse_attention", {**dict(call.facts), "page_size": page_size})


def _topk_indexer(call: Kernel) -> Draft:
    """Scores of all cached tokens by float8 queries and keys, and the best of them."""
    sizes = {"page_size": PAGED, "with_scale": call["dim"] + SCALE_BYTES}
    return draft(__package__, "dsa_topk_indexer", {**dict(call.facts), **sizes})


def _attention(module: Module, _: Reading) -> Kernel | None:
    """Attention over what an indexer names is absorbed; the whole of a short sequence is not sparse."""
    facts = module.facts
    if not (facts.get("sparse") and facts.get("absorbed") and facts.get("topk")):
        return None
    return call_of(module, "dsa", "heads", "topk", ckv=facts["kv_lora_rank"], kpe=facts["rope_dim"])


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    named = {module.facts["topk"] for module in evidence.of("indexer")}
    wrong = against_latent(call, evidence)
    if wrong is None and call["topk"] not in named:
        return f"topk: SGLang {call['topk']}, transformers {sorted(named)}"
    return wrong


EXTRACTION = Extraction(
    readers={"Indexer": ("indexer", _indexer)},
    calls={"attention": _attention, "indexer": lambda module, _: call_of(module, "dsa_indexer", *module.facts)},
    differs={"dsa": _differs, "dsa_indexer": held_against("indexer", lambda facts, _: dict(facts))},
    drafts={"dsa": _sparse_attention, "dsa_indexer": lambda call, _: [_topk_indexer(call)]},
)
