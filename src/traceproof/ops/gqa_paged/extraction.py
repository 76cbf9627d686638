"""Grouped-query attention in models, and its definitions over a paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from traceproof.models.kernel import Kernel, kernel
from traceproof.ops.common.attention_extraction import (
    KV_PAGES,
    LEN_INDPTR,
    NUM_INDICES,
    NUM_PAGES,
    PLAIN,
    Q_ENDS,
    READERS,
    TOTAL_Q,
    heads_of,
    no_form,
    outputs,
    page_constants,
    page_size_axis,
    plain,
    table,
)
from traceproof.ops.drafts import Draft, Tensors, fill, scalar, tensor, var
from traceproof.ops.extraction import Choice, Extraction

if TYPE_CHECKING:
    from traceproof.models.evidence import Evidence
    from traceproof.models.reading import Module, Reading

PAGED_DECODE = "decode.BatchDecodeWithPagedKVCacheWrapper"
PAGED_PREFILL = "prefill.BatchPrefillWithPagedKVCacheWrapper"


def _gqa_data(rows: str, page_size: int, *, prefill: bool) -> Tensors:
    cache = "num_pages page_size num_kv_heads head_dim"
    return {
        "q": tensor(f"{rows} num_qo_heads head_dim", "bfloat16", "Queries."),
        "k_cache": tensor(cache, "bfloat16", "Paged key cache."),
        "v_cache": tensor(cache, "bfloat16", "Paged value cache."),
        **table(page_size, prefill=prefill),
        "sm_scale": scalar("float32", "Softmax scale. Default is (1/sqrt(head_dim))."),
    }


def gqa_decode(heads: int, kv_heads: int, dim: int, page_size: int) -> Draft:
    """One query token a sequence."""
    axes = {
        "batch_size": var("Number of sequences, one query token each."),
        **heads_of(heads, kv_heads, dim),
        "num_pages": NUM_PAGES,
        "page_size": page_size_axis(page_size),
        "len_indptr": LEN_INDPTR,
        "num_kv_indices": NUM_INDICES,
    }
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "page_size": page_size}
    return Draft(
        name=f"gqa_paged_decode_h{heads}_kv{kv_heads}_d{dim}_ps{page_size}",
        op_type="gqa_paged",
        description=f"Batched grouped-query attention decode over a paged KV cache (page_size={page_size}).",
        axes=axes,
        constraints=["len_indptr == batch_size + 1", *KV_PAGES],
        inputs=_gqa_data("batch_size", page_size, prefill=False),
        outputs=outputs("batch_size", "head_dim"),
        reference=fill(__package__, "gqa_paged_decode", **sizes, **page_constants(page_size)),
        stage="decode",
        fi_api=PAGED_DECODE,
        tp=True,
    )


def gqa_prefill(heads: int, kv_heads: int, dim: int, page_size: int) -> Draft:
    """Several query tokens a sequence, the last of its tokens; causal."""
    axes = {
        **heads_of(heads, kv_heads, dim),
        "page_size": page_size_axis(page_size),
        "len_indptr": LEN_INDPTR,
        "total_q": TOTAL_Q,
        "num_kv_indices": NUM_INDICES,
        "num_pages": NUM_PAGES,
    }
    if page_size > 1:
        axes["batch_size"] = var("Number of sequences in the batch.")
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "page_size": page_size}
    return Draft(
        name=f"gqa_paged_prefill_causal_h{heads}_kv{kv_heads}_d{dim}_ps{page_size}",
        op_type="gqa_paged",
        description=f"Batched causal grouped-query attention prefill, paged KV cache (page_size={page_size}).",
        axes=axes,
        constraints=[Q_ENDS, *KV_PAGES],
        inputs=_gqa_data("total_q", page_size, prefill=True),
        outputs=outputs("total_q", "head_dim"),
        reference=fill(__package__, "gqa_paged_prefill", **sizes, **page_constants(page_size)),
        stage="prefill",
        fi_api=PAGED_PREFILL,
        tp=True,
    )


def _call(module: Module, _: Reading) -> Kernel | str | None:
    facts = module.facts
    if "kv_lora_rank" in facts:
        return None
    refusal = no_form(facts)
    if refusal is not None:
        return refusal
    sizes: dict[str, Any] = {"heads": facts["heads"], "kv_heads": facts["kv_heads"], "dim": facts["qk_dim"]}
    return kernel("gqa", count=module.count, path=module.path, **sizes)


def _drafts(call: Kernel, choice: Choice) -> Iterator[Draft]:
    """Decode and causal prefill at each page size."""
    sizes = (call["heads"], call["kv_heads"], call["dim"])
    for page_size in choice.page_sizes:
        yield gqa_decode(*sizes, page_size)
    for page_size in choice.page_sizes:
        yield gqa_prefill(*sizes, page_size)


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    tp = evidence.parallel.tp

    def terms(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        kv_heads = max(1, facts["kv_heads"] // tp)  # with more ranks than KV heads, ranks hold copies
        sizes = {"heads": facts["heads"] // tp, "kv_heads": kv_heads, "dim": facts["qk_dim"]}
        return sizes | {"vo_dim": facts["vo_dim"]} | plain(facts)

    return evidence.differs(call, "attention", terms, vo_dim=call["dim"], **PLAIN)


EXTRACTION = Extraction(
    readers=READERS, calls={"attention": _call}, differs={"gqa": _differs}, drafts={"gqa": _drafts}
)
