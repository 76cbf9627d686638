"""Definitions of attention: GQA paged and ragged, MLA absorbed (paged) and ragged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from traceproof.extract.definitions.form import Axes, Draft, Tensors, const, page_constants, scalar, tensor, var
from traceproof.extract.kernels import Kernel
from traceproof.extract.skeletons import fill

LSE = "The 2-based log-sum-exp of attention logits."
RAGGED = "prefill.BatchPrefillWithRaggedKVCacheWrapper"
PAGED_DECODE = "decode.BatchDecodeWithPagedKVCacheWrapper"
PAGED_PREFILL = "prefill.BatchPrefillWithPagedKVCacheWrapper"
MLA = "mla.BatchMLAPagedAttentionWrapper"
LEN_INDPTR = var("Length of the indptr arrays (number of sequences + 1).")
NUM_PAGES = var("Total number of allocated pages in the KV cache.")
NUM_INDICES = var("Total number of KV page indices.")
TOTAL_Q = var("Total number of query tokens.")
KV_PAGES = ["num_kv_indices == kv_indptr[-1].item()"]
Q_ENDS = "total_q == qo_indptr[-1].item()"


def _page_size(page_size: int) -> dict[str, object]:
    return const(page_size, "Number of tokens stored per page.")


def _table(page_size: int, *, prefill: bool) -> Tensors:
    """The page table's inputs: offsets, page numbers, and the last page's length where it can be partly filled."""
    inputs: Tensors = {}
    if prefill:
        inputs["qo_indptr"] = tensor("len_indptr", "int32", "Query offsets for each sequence.")
    inputs["kv_indptr"] = tensor("len_indptr", "int32", "KV page offsets for each sequence.")
    inputs["kv_indices"] = tensor("num_kv_indices", "int32", "Page numbers, sequence by sequence.")
    if page_size > 1:
        last = "Number of valid tokens in the last page for each sequence."
        inputs["kv_last_page_len"] = tensor("batch_size", "int32", last)
    return inputs


def gqa(kernel: Kernel, page_sizes: Sequence[int]) -> Iterator[Draft]:
    """Decode and causal prefill at each page size, and ragged prefill."""
    heads, kv_heads, dim = kernel["heads"], kernel["kv_heads"], kernel["dim"]
    for page_size in page_sizes:
        yield gqa_decode(heads, kv_heads, dim, page_size)
    for page_size in page_sizes:
        yield gqa_prefill(heads, kv_heads, dim, page_size)
    yield gqa_ragged(heads, kv_heads, dim)


def _gqa_heads(heads: int, kv_heads: int, dim: int) -> Axes:
    return {
        "num_qo_heads": const(heads, "Number of query heads on one rank."),
        "num_kv_heads": const(kv_heads, "Number of key and value heads on one rank."),
        "head_dim": const(dim, "Channels of a head."),
    }


def _gqa_data(rows: str, page_size: int, *, prefill: bool) -> Tensors:
    cache = "num_pages page_size num_kv_heads head_dim"
    return {
        "q": tensor(f"{rows} num_qo_heads head_dim", "bfloat16", "Queries."),
        "k_cache": tensor(cache, "bfloat16", "Paged key cache."),
        "v_cache": tensor(cache, "bfloat16", "Paged value cache."),
        **_table(page_size, prefill=prefill),
        "sm_scale": scalar("float32", "Softmax scale. Default is (1/sqrt(head_dim))."),
    }


def _outputs(rows: str, width: str) -> Tensors:
    return {
        "output": tensor(f"{rows} num_qo_heads {width}", "bfloat16", "Attention output."),
        "lse": tensor(f"{rows} num_qo_heads", "float32", LSE),
    }


def gqa_decode(heads: int, kv_heads: int, dim: int, page_size: int) -> Draft:
    """One query token a sequence."""
    axes = {
        "batch_size": var("Number of sequences, one query token each."),
        **_gqa_heads(heads, kv_heads, dim),
        "num_pages": NUM_PAGES,
        "page_size": _page_size(page_size),
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
        outputs=_outputs("batch_size", "head_dim"),
        reference=fill("gqa_paged_decode", **sizes, **page_constants(page_size)),
        stage="decode",
        fi_api=PAGED_DECODE,
        tp=True,
    )


def gqa_prefill(heads: int, kv_heads: int, dim: int, page_size: int) -> Draft:
    """Several query tokens a sequence, the last of its tokens; causal."""
    axes = {
        **_gqa_heads(heads, kv_heads, dim),
        "page_size": _page_size(page_size),
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
        outputs=_outputs("total_q", "head_dim"),
        reference=fill("gqa_paged_prefill", **sizes, **page_constants(page_size)),
        stage="prefill",
        fi_api=PAGED_PREFILL,
        tp=True,
    )


def _ragged(qk: str, vo: str) -> Tensors:
    return {
        "q": tensor(f"total_q num_qo_heads {qk}", "bfloat16", "Queries."),
        "k": tensor(f"total_kv num_kv_heads {qk}", "bfloat16", "Keys."),
        "v": tensor(f"total_kv num_kv_heads {vo}", "bfloat16", "Values."),
        "qo_indptr": tensor("len_indptr", "int32", "Query offsets for each sequence."),
        "kv_indptr": tensor("len_indptr", "int32", "Key-value offsets for each sequence."),
        "sm_scale": scalar("float32", f"Softmax scale. Default is (1/sqrt({qk}))."),
    }


RAGGED_AXES: Axes = {
    "len_indptr": LEN_INDPTR,
    "total_q": TOTAL_Q,
    "total_kv": var("Total key-value tokens across all sequences."),
}
RAGGED_CONSTRAINTS = (Q_ENDS, "total_kv == kv_indptr[-1].item()")


def gqa_ragged(heads: int, kv_heads: int, dim: int) -> Draft:
    """Whole sequences, keys and values side by side; causal."""
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "qk_dim": dim, "vo_dim": dim}
    return Draft(
        name=f"gqa_ragged_prefill_causal_h{heads}_kv{kv_heads}_d{dim}",
        op_type="gqa_ragged",
        description="Batched grouped-query attention prefill over ragged inputs, causal.",
        axes=_gqa_heads(heads, kv_heads, dim) | RAGGED_AXES,
        constraints=RAGGED_CONSTRAINTS,
        inputs=_ragged("head_dim", "head_dim"),
        outputs=_outputs("total_q", "head_dim"),
        reference=fill("ragged_prefill", **sizes),
        stage="prefill",
        fi_api=RAGGED,
        tp=True,
    )


def mla_ragged(kernel: Kernel) -> Draft:
    """MLA before absorption: full keys and values per head."""
    heads, qk, vo = kernel["heads"], kernel["qk"], kernel["vo"]
    axes = {
        "num_qo_heads": const(heads, "Number of query heads on one rank."),
        "num_kv_heads": const(heads, "Number of key and value heads on one rank."),
        "qk_dim": const(qk, "Channels of a query or key head, the rotated ones included."),
        "vo_dim": const(vo, "Channels of a value head."),
        "total_q": RAGGED_AXES["total_q"],
        "total_kv": RAGGED_AXES["total_kv"],
        "len_indptr": LEN_INDPTR,
    }
    return Draft(
        name=f"mla_ragged_prefill_causal_h{heads}_qk{qk}_vo{vo}",
        op_type="mla_ragged",
        description="Batched multi-head latent attention prefill over ragged inputs, not absorbed, causal.",
        axes=axes,
        constraints=RAGGED_CONSTRAINTS,
        inputs=_ragged("qk_dim", "vo_dim"),
        outputs=_outputs("total_q", "vo_dim"),
        reference=fill("ragged_prefill", num_qo_heads=heads, num_kv_heads=heads, qk_dim=qk, vo_dim=vo),
        stage="prefill",
        fi_api=RAGGED,
        tp=True,
    )


def mla_paged(kernel: Kernel, page_sizes: Sequence[int]) -> Iterator[Draft]:
    """Absorbed MLA: decode and causal prefill at each page size."""
    for prefill in (False, True):
        for page_size in page_sizes:
            yield _mla(kernel["heads"], kernel["ckv"], kernel["kpe"], page_size, prefill=prefill)


def _mla(heads: int, ckv: int, kpe: int, page_size: int, *, prefill: bool) -> Draft:
    rows = "total_q" if prefill else "batch_size"
    head_axes: Axes = {
        "num_qo_heads": const(heads, "Number of query heads on one rank."),
        "head_dim_ckv": const(ckv, "Channels of the compressed key-value vector."),
        "head_dim_kpe": const(kpe, "Channels of the rotated part of a key."),
        "page_size": _page_size(page_size),
    }
    pages: Axes = {"num_pages": NUM_PAGES, "len_indptr": LEN_INDPTR, "num_kv_indices": NUM_INDICES}
    batch: Axes = {"batch_size": var("Number of sequences in the batch.")}
    if prefill:
        axes = head_axes | {"total_q": TOTAL_Q} | pages | (batch if page_size > 1 else {})
    else:
        axes = batch | head_axes | pages
    scale = "Softmax scale. Default is 1/sqrt(128 + 64) for 128 + 64 channels a head before absorption."
    inputs = {
        "q_nope": tensor(f"{rows} num_qo_heads head_dim_ckv", "bfloat16", "Absorbed queries without position."),
        "q_pe": tensor(f"{rows} num_qo_heads head_dim_kpe", "bfloat16", "Rotated part of the queries."),
        "ckv_cache": tensor("num_pages page_size head_dim_ckv", "bfloat16", "Compressed keys and values."),
        "kpe_cache": tensor("num_pages page_size head_dim_kpe", "bfloat16", "Rotated part of the keys."),
        **_table(page_size, prefill=prefill),
        "sm_scale": scalar("float32", scale),
    }
    kind = "prefill_causal" if prefill else "decode"
    sizes = {"num_qo_heads": heads, "head_dim_ckv": ckv, "head_dim_kpe": kpe, "page_size": page_size}
    skeleton = "mla_paged_prefill" if prefill else "mla_paged_decode"
    masked = ", causal" if prefill else ""
    return Draft(
        name=f"mla_paged_{kind}_h{heads}_ckv{ckv}_kpe{kpe}_ps{page_size}",
        op_type="mla_paged",
        description=f"Batched multi-head latent attention over a paged KV cache (page_size={page_size}){masked}.",
        axes=axes,
        constraints=[Q_ENDS if prefill else "len_indptr == batch_size + 1", *KV_PAGES],
        inputs=inputs,
        outputs=_outputs(rows, "head_dim_ckv"),
        reference=fill(skeleton, **sizes, **page_constants(page_size)),
        stage="prefill" if prefill else "decode",
        fi_api=MLA,
        tp=True,
    )
