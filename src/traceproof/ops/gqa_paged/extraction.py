"""Grouped-query attention in models, and its definitions over a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from traceproof.ops.common.attention_extraction import (
    KV_PAGES,
    LEN_INDPTR,
    NUM_INDICES,
    NUM_PAGES,
    Q_ENDS,
    READERS,
    TOTAL_Q,
    heads_of,
    no_form,
    outputs,
    page_constants,
    page_size_axis,
    table,
)
from traceproof.ops.drafts import Draft, Tensors, fill, scalar, tensor, var
from traceproof.ops.extraction import Choice, Extraction, Kernel, kernel

if TYPE_CHECKING:
    from traceproof.extract.formulas import Model
    from traceproof.extract.reading import Module, Reading

QK_NORMS = frozenset({"qwen3", "qwen3_moe", "qwen3_next"})  # these normalise each query and key head
OUTPUT_GATE = frozenset({"qwen3_next"})  # its query projection makes a gate for the output too
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


def _formulas(model: Model) -> Iterator[Kernel]:
    fields, tp, count = model.fields, model.tp, model.attention_layers
    if not count:
        return
    heads = model.heads()
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        fields.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if kv_heads % tp and tp % kv_heads:
        fields.problems.append(
            f"tp: {tp} neither divides num_key_value_heads = {kv_heads} nor is a multiple of it"
        )
    if not fields.has("head_dim") and model.hidden % heads:
        fields.divides("num_attention_heads", heads, "hidden_size", model.hidden)
    dim = fields.count("head_dim", "attention_head_dim", default=max(1, model.hidden // heads))
    rank_kv = max(1, kv_heads // tp)  # with more ranks than KV heads, ranks hold copies
    queries = heads * (2 if model.family in OUTPUT_GATE else 1)
    rank_n = (queries // tp + 2 * rank_kv) * dim
    yield model.columns("qkv_proj", (queries + 2 * kv_heads) * dim, model.hidden, count, rank_n=rank_n)
    yield model.rows("o_proj", model.hidden, heads * dim, count)
    yield kernel("gqa", count=count, path="attn", heads=heads // tp, kv_heads=rank_kv, dim=dim)
    if model.family in QK_NORMS:
        yield model.norm("q_norm", dim, 2 * count, stream=False)
    if not model.pattern:  # the Mamba hybrids have no position embedding
        rotary = int(dim * fields.number("partial_rotary_factor", default=1.0))
        yield model.rotary(count, head_dim=dim, rotary_dim=rotary, style="neox")


def _drafts(call: Kernel, choice: Choice) -> Iterator[Draft]:
    """Decode and causal prefill at each page size."""
    sizes = (call["heads"], call["kv_heads"], call["dim"])
    for page_size in choice.page_sizes:
        yield gqa_decode(*sizes, page_size)
    for page_size in choice.page_sizes:
        yield gqa_prefill(*sizes, page_size)


EXTRACTION = Extraction(readers=READERS, calls={"attention": _call}, formulas=_formulas, drafts={"gqa": _drafts})
