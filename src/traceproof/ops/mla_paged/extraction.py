"""Multi-head latent attention in models, and its absorbed definitions over a paged cache."""

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
    no_form,
    outputs,
    page_constants,
    page_size_axis,
    table,
)
from traceproof.ops.drafts import Axes, Draft, const, fill, scalar, tensor, var
from traceproof.ops.extraction import Choice, Extraction, Kernel, kernel

if TYPE_CHECKING:
    from traceproof.extract.formulas import Model
    from traceproof.extract.reading import Module, Reading

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
        "page_size": page_size_axis(page_size),
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
        **table(page_size, prefill=prefill),
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
        outputs=outputs(rows, "head_dim_ckv"),
        reference=fill(__package__, skeleton, **sizes, **page_constants(page_size)),
        stage="prefill" if prefill else "decode",
        fi_api=MLA,
        tp=True,
    )


def _call(module: Module, _: Reading) -> Kernel | str | None:
    facts = module.facts
    if not facts.get("absorbed"):
        return None
    refusal = no_form(facts)
    if refusal is not None:
        return refusal
    sizes: dict[str, Any] = {"heads": facts["heads"], "ckv": facts["kv_lora_rank"], "kpe": facts["rope_dim"]}
    return kernel("mla_absorbed", count=module.count, path=module.path, **sizes)


def _formulas(model: Model) -> Iterator[Kernel]:
    count = model.latent_layers
    if not count:
        return
    fields, heads = model.fields, model.heads()
    ckv, kpe = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, values = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    if fields.has("q_lora_rank"):
        q_rank = fields.count("q_lora_rank")
        yield model.whole("fused_qkv_a_proj_with_mqa", q_rank + ckv + kpe, model.hidden, count)
        yield model.norm("q_a_layernorm", q_rank, count, stream=False)
        yield model.columns("q_b_proj", heads * (nope + kpe), q_rank, count)
    else:
        yield model.whole("kv_a_proj_with_mqa", ckv + kpe, model.hidden, count)
        yield model.columns("q_proj", heads * (nope + kpe), model.hidden, count)
    yield model.norm("kv_a_layernorm", ckv, count, stream=False)
    yield model.columns("kv_b_proj", heads * (nope + values), ckv, count)
    yield model.rows("o_proj", model.hidden, heads * values, count)
    yield kernel("mla_absorbed", count=count, path="attn_mqa", heads=heads // model.tp, ckv=ckv, kpe=kpe)
    yield model.rotary(count, head_dim=kpe, rotary_dim=kpe, style="gptj")


EXTRACTION = Extraction(
    readers=READERS, calls={"attention": _call}, formulas=_formulas, drafts={"mla_absorbed": mla_paged}
)
