"""DeepSeek's sparse attention in models: the indexer, and absorbed attention over what it names."""

from typing import Any

from traceproof.models.evidence import Evidence
from traceproof.models.kernel import Kernel
from traceproof.models.reading import Module, Reading
from traceproof.ops.common.attention_extraction import NUM_PAGES, against_latent, outputs, page_size_axis
from traceproof.ops.drafts import Draft, const, fill, scalar, tensor, var
from traceproof.ops.extraction import Extraction, Facts, call_of, held_against

PAGED = 64  # tokens of a page of the indexer's cache: DeepGEMM has no other
SCALE_BYTES = 4
SPARSE = ("sparse:topk",)


def _indexer(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    return {"heads": module.n_heads, "dim": module.head_dim, "topk": module.index_topk}


def sparse_attention(call: Kernel, page_size: int) -> Draft:
    """Absorbed attention over listed entries of the cache, one list per token."""
    heads, ckv, kpe, topk = (call[name] for name in ("heads", "ckv", "kpe", "topk"))
    sizes = {"num_qo_heads": heads, "head_dim_ckv": ckv, "head_dim_kpe": kpe, "page_size": page_size, "topk": topk}
    return Draft(
        name=f"dsa_sparse_attention_h{heads}_ckv{ckv}_kpe{kpe}_topk{topk}_ps{page_size}",
        description=f"Sparse multi-head latent attention over the entries listed (page_size={page_size}).",
        axes={
            "num_tokens": var("Number of tokens."),
            "num_qo_heads": const(heads, "Number of query heads on one rank."),
            "head_dim_ckv": const(ckv, "Channels of the compressed key-value vector."),
            "head_dim_kpe": const(kpe, "Channels of the rotated part of a key."),
            "page_size": page_size_axis(page_size),
            "topk": const(topk, "Entries that a token's list has room for."),
            "num_pages": NUM_PAGES,
        },
        constraints=[
            "sparse_indices.shape[0] == num_tokens",
            "sparse_indices.shape[-1] == topk",
            "ckv_cache.shape[1] == page_size",
        ],
        inputs={
            "q_nope": tensor("num_tokens num_qo_heads head_dim_ckv", "bfloat16", "Absorbed queries."),
            "q_pe": tensor("num_tokens num_qo_heads head_dim_kpe", "bfloat16", "Rotated part of the queries."),
            "ckv_cache": tensor("num_pages page_size head_dim_ckv", "bfloat16", "Compressed keys and values."),
            "kpe_cache": tensor("num_pages page_size head_dim_kpe", "bfloat16", "Rotated part of the keys."),
            "sparse_indices": tensor("num_tokens topk", "int32", "page * page_size + place; -1 names nothing."),
            "sm_scale": scalar("float32", "Softmax scale, of the width of a head before absorption."),
        },
        outputs=outputs("num_tokens", "head_dim_ckv"),
        filled=fill(__package__, "dsa_sparse_attention", **sizes),
        extra_tags=SPARSE,
        tp=True,
    )


def topk_indexer(call: Kernel) -> Draft:
    """Scores of all cached tokens by float8 queries and keys, and the best of them."""
    heads, dim, topk = (call[name] for name in ("heads", "dim", "topk"))
    sizes = {"num_index_heads": heads, "index_head_dim": dim, "page_size": PAGED, "topk": topk}
    cache = "Of a page, the float8 keys of all tokens, then a float32 scale of each; int8 stands for bytes."
    return Draft(
        name=f"dsa_topk_indexer_fp8_h{heads}_d{dim}_topk{topk}_ps{PAGED}",
        description="Indexer of sparse attention: sum(relu(q @ K.T) * weights), and the topk best of a row.",
        axes={
            "batch_size": var("Number of sequences, one token each."),
            "num_index_heads": const(heads, "Heads of the indexer, the same on every rank."),
            "index_head_dim": const(dim, "Channels of a head."),
            "page_size": page_size_axis(PAGED),
            "topk": const(topk, "Tokens to name."),
            "max_num_pages": var("Pages that a sequence may have."),
            "num_pages": NUM_PAGES,
            "kv_cache_num_heads": const(1, "Heads of the cache."),
            "head_dim_with_scale": const(dim + SCALE_BYTES, "Bytes of a key and its scale."),
        },
        constraints=["topk <= max_num_pages * page_size"],
        inputs={
            "q_index_fp8": tensor("batch_size num_index_heads index_head_dim", "float8_e4m3fn", "Queries."),
            "k_index_cache_fp8": tensor(
                "num_pages page_size kv_cache_num_heads head_dim_with_scale", "int8", cache
            ),
            "weights": tensor(
                "batch_size num_index_heads", "float32", "Of each head, its query's scale among them."
            ),
            "seq_lens": tensor("batch_size", "int32", "Tokens of each sequence."),
            "block_table": tensor("batch_size max_num_pages", "int32", "Page numbers of each sequence."),
        },
        outputs={"topk_indices": tensor("batch_size topk", "int32", "page * page_size + place, then -1.")},
        filled=fill(__package__, "dsa_topk_indexer", **sizes),
        stage="indexer",
        extra_tags=(*SPARSE, "quant:fp8"),
    )


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
    differs={
        "dsa": _differs,
        "dsa_indexer": held_against("indexer", lambda facts, _: dict(facts)),
    },
    drafts={
        "dsa": lambda call, choice: [sparse_attention(call, page_size) for page_size in choice.page_sizes],
        "dsa_indexer": lambda call, _: [topk_indexer(call)],
    },
)
