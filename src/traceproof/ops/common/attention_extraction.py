"""What extractions of attention share."""

from collections.abc import Iterator, Mapping
from typing import Any

from traceproof.models.evidence import Evidence
from traceproof.models.kernel import Kernel
from traceproof.models.reading import Module
from traceproof.ops.drafts import Axes, Tensors, const, scalar, tensor, var
from traceproof.ops.extraction import Facts, call_of, held_against


def read_attention(module: Any, parent: Any) -> Facts:  # noqa: ANN401
    """Facts of a layer of attention, latent or not."""
    facts = {
        "heads": module.tp_q_head_num,
        "kv_heads": module.tp_k_head_num,
        "qk_dim": module.qk_head_dim,
        "vo_dim": module.v_head_dim,
        "scale": module.scaling,
        "window": module.sliding_window_size,
        "logit_cap": module.logit_cap,
    }
    rank, rope = getattr(parent, "kv_lora_rank", None), getattr(parent, "qk_rope_head_dim", None)
    if rank is not None and rope is not None:
        facts |= {"kv_lora_rank": rank, "rope_dim": rope, "absorbed": module.v_head_dim == rank}
    if any("sink" in name and value is not None for name, value in _attributes(parent)):
        facts["sinks"] = True
    if getattr(module, "use_irope", False):
        facts["chunks"] = True
    if getattr(parent, "use_dsa", False):
        facts["sparse"] = True
        facts["topk"] = getattr(getattr(parent, "indexer", None), "index_topk", None)
    return facts


def _attributes(module: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    for held in (module, getattr(module, "_parameters", None)):
        yield from (held if isinstance(held, dict) else getattr(held, "__dict__", {})).items()


def no_form(facts: Mapping[str, Any]) -> str | None:
    """Why the dataset has no form for attention with these facts; None: it has one."""
    kinds = {"sparse": "sparse attention that is not absorbed", "chunks": "attention within chunks"}
    if what := next((text for name, text in kinds.items() if facts.get(name)), None):
        return f"{what}: no form"
    window = f"sliding window of {facts['window']} tokens" if (facts["window"] or -1) > 0 else ""
    if facts.get("sinks"):
        return f"attention with sinks: no form {window}".rstrip()
    if window:
        return f"attention with a window: a {window}, which no form can say"
    if facts["logit_cap"]:
        return f"attention with capped logits: at {facts['logit_cap']}, which no form can say"
    if "kv_lora_rank" not in facts and facts["qk_dim"] != facts["vo_dim"]:
        return f"attention of two widths: keys of {facts['qk_dim']}, values of {facts['vo_dim']}, no form"
    return None


def called(module: Module, kind: str, **sizes: str) -> Kernel | str:
    """The call of an attention whose sizes are these of its facts, or why the dataset has no form for it."""
    refusal = no_form(module.facts)
    if refusal is not None:
        return refusal
    return call_of(module, kind, **{name: module.facts[fact] for name, fact in sizes.items()})


PLAIN: Mapping[str, Any] = {"window": None, "logit_cap": None, "sinks": False}


def plain(facts: Mapping[str, Any]) -> Facts:
    """What transformers gives an attention beside queries, keys and values; `PLAIN` where that is nothing."""
    return {name: facts[name] or nothing for name, nothing in PLAIN.items()}


def _latent(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    ckv, kpe = facts.get("kv_lora_rank"), facts.get("qk_rope_head_dim")
    return {"heads": facts["heads"] // evidence.parallel.attention, "ckv": ckv, "kpe": kpe} | plain(facts)


against_latent = held_against("attention", _latent, **PLAIN)  # of absorbed attention


def page_constants(page_size: int) -> Mapping[str, str]:
    """What a paged skeleton wants: how many tokens a row has, and whether the last page's length is an input."""
    if page_size == 1:
        return {"last_page_argument": "", "num_tokens": "len(pages)"}
    return {
        "last_page_argument": "kv_last_page_len, ",
        "num_tokens": "(len(pages) - 1) * PAGE_SIZE + int(kv_last_page_len[row])",
    }


LSE = "The 2-based log-sum-exp of attention logits."
RAGGED = "prefill.BatchPrefillWithRaggedKVCacheWrapper"
LEN_INDPTR = var("Length of the indptr arrays (number of sequences + 1).")
NUM_PAGES = var("Total number of allocated pages in the KV cache.")
NUM_INDICES = var("Total number of KV page indices.")
TOTAL_Q = var("Total number of query tokens.")
KV_PAGES = ["num_kv_indices == kv_indptr[-1].item()"]
Q_ENDS = "total_q == qo_indptr[-1].item()"


def page_size_axis(page_size: int) -> dict[str, object]:
    """The axis of tokens within a page."""
    return const(page_size, "Number of tokens stored per page.")


def table(page_size: int, *, prefill: bool) -> Tensors:
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


def heads_of(heads: int, kv_heads: int, dim: int) -> Axes:
    """Heads and their width."""
    return {
        "num_qo_heads": const(heads, "Number of query heads on one rank."),
        "num_kv_heads": const(kv_heads, "Number of key and value heads on one rank."),
        "head_dim": const(dim, "Channels of a head."),
    }


def outputs(rows: str, width: str) -> Tensors:
    """The output and its log-sum-exp."""
    return {
        "output": tensor(f"{rows} num_qo_heads {width}", "bfloat16", "Attention output."),
        "lse": tensor(f"{rows} num_qo_heads", "float32", LSE),
    }


def ragged(qk: str, vo: str) -> Tensors:
    """Inputs of a prefill over ragged keys and values."""
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


READERS = {"RadixAttention": ("attention", read_attention)}
