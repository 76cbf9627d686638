"""Multi-head latent attention in models, and its absorbed definitions over a paged cache."""

from collections.abc import Iterator

from traceproof.models.kernel import Kernel
from traceproof.models.reading import Module, Reading
from traceproof.ops.common import attention_extraction as attention
from traceproof.ops.drafts import Axes, Draft, const, fill, scalar, tensor, var
from traceproof.ops.extraction import Choice, Extraction

MLA = "mla.BatchMLAPagedAttentionWrapper"


def mla_paged(call: Kernel, choice: Choice) -> Iterator[Draft]:
    """Absorbed MLA: decode and causal prefill at each page size."""
    for prefill in (False, True):
        for page_size in choice.page_sizes:
            yield _mla(call["heads"], call["ckv"], call["kpe"], page_size, prefill=prefill)


def _mla(heads: int, ckv: int, kpe: int, page_size: int, *, prefill: bool) -> Draft:
    rows = "total_q" if prefill else "batch_size"
    head_axes: Axes = {
        "num_qo_heads": const(heads, "Number of query heads on one rank."),
        "head_dim_ckv": const(ckv, "Channels of the compressed key-value vector."),
        "head_dim_kpe": const(kpe, "Channels of the rotated part of a key."),
        "page_size": attention.page_size_axis(page_size),
    }
    pages: Axes = {
        "num_pages": attention.NUM_PAGES,
        "len_indptr": attention.LEN_INDPTR,
        "num_kv_indices": attention.NUM_INDICES,
    }
    batch: Axes = {"batch_size": var("Number of sequences in the batch.")}
    if prefill:
        axes = head_axes | {"total_q": attention.TOTAL_Q} | pages | (batch if page_size > 1 else {})
    else:
        axes = batch | head_axes | pages
    scale = "Softmax scale. Default is 1/sqrt(128 + 64) for 128 + 64 channels a head before absorption."
    inputs = {
        "q_nope": tensor(f"{rows} num_qo_heads head_dim_ckv", "bfloat16", "Absorbed queries without position."),
        "q_pe": tensor(f"{rows} num_qo_heads head_dim_kpe", "bfloat16", "Rotated part of the queries."),
        "ckv_cache": tensor("num_pages page_size head_dim_ckv", "bfloat16", "Compressed keys and values."),
        "kpe_cache": tensor("num_pages page_size head_dim_kpe", "bfloat16", "Rotated part of the keys."),
        **attention.table(page_size, prefill=prefill),
        "sm_scale": scalar("float32", scale),
    }
    kind = "prefill_causal" if prefill else "decode"
    sizes = {"num_qo_heads": heads, "head_dim_ckv": ckv, "head_dim_kpe": kpe, "page_size": page_size}
    skeleton = "mla_paged_prefill" if prefill else "mla_paged_decode"
    masked = ", causal" if prefill else ""
    return Draft(
        name=f"mla_paged_{kind}_h{heads}_ckv{ckv}_kpe{kpe}_ps{page_size}",
        description=f"Batched multi-head latent attention over a paged KV cache (page_size={page_size}){masked}.",
        axes=axes,
        constraints=[attention.Q_ENDS if prefill else "len_indptr == batch_size + 1", *attention.KV_PAGES],
        inputs=inputs,
        outputs=attention.outputs(rows, "head_dim_ckv"),
        filled=fill(__package__, skeleton, **sizes, **attention.page_constants(page_size)),
        stage="prefill" if prefill else "decode",
        fi_api=MLA,
        tp=True,
    )


def _call(module: Module, _: Reading) -> Kernel | str | None:
    if not module.facts.get("absorbed"):
        return None
    return attention.called(module, "mla_absorbed", heads="heads", ckv="kv_lora_rank", kpe="rope_dim")


EXTRACTION = Extraction(
    readers=attention.READERS,
    calls={"attention": _call},
    differs={"mla_absorbed": attention.against_latent},
    drafts={"mla_absorbed": mla_paged},
)
