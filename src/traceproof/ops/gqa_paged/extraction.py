"""Grouped-query attention in models, and its definitions over a paged cache."""

from collections.abc import Iterator, Mapping
from typing import Any

from traceproof.models.evidence import Evidence
from traceproof.models.kernel import Kernel
from traceproof.models.reading import Module, Reading
from traceproof.ops.common import attention_extraction as attention
from traceproof.ops.drafts import Draft, Tensors, fill, scalar, tensor, var
from traceproof.ops.extraction import Choice, Extraction

PAGED_DECODE = "decode.BatchDecodeWithPagedKVCacheWrapper"
PAGED_PREFILL = "prefill.BatchPrefillWithPagedKVCacheWrapper"


def _gqa_data(rows: str, page_size: int, *, prefill: bool) -> Tensors:
    cache = "num_pages page_size num_kv_heads head_dim"
    return {
        "q": tensor(f"{rows} num_qo_heads head_dim", "bfloat16", "Queries."),
        "k_cache": tensor(cache, "bfloat16", "Paged key cache."),
        "v_cache": tensor(cache, "bfloat16", "Paged value cache."),
        **attention.table(page_size, prefill=prefill),
        "sm_scale": scalar("float32", "Softmax scale. Default is (1/sqrt(head_dim))."),
    }


def _gqa(heads: int, kv_heads: int, dim: int, page_size: int, *, prefill: bool) -> Draft:
    """One query token a sequence; in prefill several, the last of its tokens, causal."""
    size, wide = attention.page_size_axis(page_size), attention.heads_of(heads, kv_heads, dim)
    if prefill:
        axes = {**wide, "page_size": size, "len_indptr": attention.LEN_INDPTR, "total_q": attention.TOTAL_Q}
        axes |= {"num_kv_indices": attention.NUM_INDICES, "num_pages": attention.NUM_PAGES}
        axes |= {"batch_size": var("Number of sequences in the batch.")} if page_size > 1 else {}
    else:
        axes = {
            "batch_size": var("Number of sequences, one query token each."),
            **wide,
            "num_pages": attention.NUM_PAGES,
        }
        axes |= {"page_size": size, "len_indptr": attention.LEN_INDPTR, "num_kv_indices": attention.NUM_INDICES}
    rows, stage = ("total_q", "prefill") if prefill else ("batch_size", "decode")
    kind = "prefill_causal" if prefill else "decode"
    what = "causal grouped-query attention prefill," if prefill else "grouped-query attention decode over a"
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "page_size": page_size}
    return Draft(
        name=f"gqa_paged_{kind}_h{heads}_kv{kv_heads}_d{dim}_ps{page_size}",
        description=f"Batched {what} paged KV cache (page_size={page_size}).",
        axes=axes,
        constraints=[attention.Q_ENDS if prefill else "len_indptr == batch_size + 1", *attention.KV_PAGES],
        inputs=_gqa_data(rows, page_size, prefill=prefill),
        outputs=attention.outputs(rows, "head_dim"),
        filled=fill(__package__, f"gqa_paged_{stage}", **sizes, **attention.page_constants(page_size)),
        stage=stage,
        fi_api=PAGED_PREFILL if prefill else PAGED_DECODE,
        tp=True,
    )


def _call(module: Module, _: Reading) -> Kernel | str | None:
    if "kv_lora_rank" in module.facts:
        return None
    return attention.called(module, "gqa", heads="heads", kv_heads="kv_heads", dim="qk_dim")


def _drafts(call: Kernel, choice: Choice) -> Iterator[Draft]:
    """Decode and causal prefill at each page size."""
    for prefill in (False, True):
        for page_size in choice.page_sizes:
            yield _gqa(call["heads"], call["kv_heads"], call["dim"], page_size, prefill=prefill)


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    tp = evidence.parallel.attention

    def terms(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        kv_heads = max(1, facts["kv_heads"] // tp)  # with more ranks than KV heads, ranks hold copies
        sizes = {"heads": facts["heads"] // tp, "kv_heads": kv_heads, "dim": facts["qk_dim"]}
        return sizes | {"vo_dim": facts["vo_dim"]} | attention.plain(facts)

    return evidence.differs(call, "attention", terms, vo_dim=call["dim"], **attention.PLAIN)


EXTRACTION = Extraction(
    readers=attention.READERS, calls={"attention": _call}, differs={"gqa": _differs}, drafts={"gqa": _drafts}
)
