"""Attention as TensorRT-LLM's, cuDNN's, XQA's, PrimTS's and MiniMax's kernels are called, and that of one request.

Their inputs (tables, lengths, blocks) are recognised by name, see `ops/attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from traceproof.dataset.constants import Rule
from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.ops import attention as calls
from traceproof.ops.adapter import SM75, SM80, Api, Module, Outputs, dim
from traceproof.ops.attention import BLOCKED, KV_ENDS, MSA_BLOCK, QUERIES, Spans, attention, one_of, operands_of
from traceproof.ops.attention_inputs import Planned
from traceproof.ops.attention_op import MUTANTS, Attention
from traceproof.ops.base import Given, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.families.attention import SOFTMAX, by_sdpa_alone, by_softmax
from traceproof.ops.formats import E2M1, E4M3, FP4_BLOCK, unpack, unswizzle
from traceproof.ops.formula import Formula, Mutant, Wide, altered, has
from traceproof.ops.op import LARGE_AND_SMALL

ON_PAGES: Any = {"family": "attention", "coupled": True}

# msa_proxy: the largest logit of each tile of keys, of each head and query, which is MiniMax's proxy of attention.


def peaks(
    wide: Wide,
    *,
    tile: int = MSA_BLOCK,
    largest: Callable[[torch.Tensor], torch.Tensor] = lambda part: part.amax(-1),
    spans: Callable[[Spans], Spans] = tuple,
    interleaved: bool = False,
    scales_of: Callable[[torch.Tensor, int, int], torch.Tensor] = unswizzle,
) -> Tensors:
    """`max_score` [heads, tiles, queries] of unscaled products; -inf where a query sees no key of a tile.

    Codes are in nvfp4, with swizzled scales. Mutants change all keywords, e.g. `scales_of`, how scales are read.
    """
    values, factor = dict(wide.values), 1.0
    for name in ("q", "k"):
        if f"{name}_fp4" in wide:
            numbers = E2M1.decode(unpack(wide.given(f"{name}_fp4")))
            tokens, heads, blocks = (*numbers.shape[:2], numbers.shape[2] // FP4_BLOCK)
            scale = E4M3.decode(scales_of(wide.given(f"{name}_scale"), tokens * heads, blocks))
            values[name] = numbers * scale.view(tokens, heads, blocks).repeat_interleave(FP4_BLOCK, -1)
            factor *= wide.number(f"{name}_global_scale")
    operands = operands_of(wide.definition, values)
    heads, kv_heads = operands.q.shape[1], operands.k.shape[1]
    head = torch.arange(heads, device=operands.q.device)
    key_head = head % kv_heads if interleaved else head // (heads // kv_heads)
    longest = max((len(span.rows) for span in operands.spans), default=0)
    shape = (heads, -(-longest // MSA_BLOCK), len(operands.q))
    scores = torch.full(shape, -math.inf, dtype=wide.dtype, device=operands.q.device)
    for span in spans(operands.spans):
        queries, keys = operands.q[span.start : span.stop].to(wide.dtype), operands.k[span.rows].to(wide.dtype)
        logits = torch.einsum("nhd,lhd->hnl", queries, keys[:, key_head]) * factor
        logits = logits.masked_fill(~calls.visible(span, span.start, span.stop), -math.inf)
        for at, part in enumerate(torch.split(logits, tile, -1)[: shape[1]] if len(keys) else ()):
            scores[:, at, span.start : span.stop] = largest(part)
    return {"max_score": scores}


class Peaks(Attention):
    """The largest logits of tiles, over attention's cases, with codes where the definition has them."""

    formula: Formula = staticmethod(peaks)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Inputs with random fp4 codes, and e4m3 scales between a half and two."""
        values = super().inputs(definition, case, draw)
        for name in values.keys() & {"q_fp4", "k_fp4", "q_scale", "k_scale"}:
            low, high = (0, 256) if name.endswith("fp4") else (0x30, 0x41)
            shape = definition.shape_of(definition.inputs[name], case.axes) or ()
            values[name] = draw.integers(name, shape, torch.int32, low=low, high=high).to(torch.uint8)
        return values


MSA_PROXY = Peaks(
    "msa_proxy",
    gates={},
    unusual={**LARGE_AND_SMALL, "nan": QUERIES[:2]},
    lossless=lambda _: {},
    mutants=(
        *(one for one in MUTANTS if one.name in {"wrong head map", "no causal mask", "causal mask off by one"}),
        Mutant("tiles of 64", applies=lambda wide: one_of(KV_ENDS, wide.values).diff().max() > 64, tile=64),
        Mutant("the mean in place of the largest", largest=lambda part: part.clamp_min(-1e4).mean(-1)),
        Mutant("the largest magnitude", largest=lambda part: part.clamp_min(-1e4).abs().amax(-1)),
        Mutant(
            "the first of a tile left out",
            largest=lambda part: part[..., 1:].amax(-1) if part.shape[-1] > 1 else part[..., 0],
        ),
        Mutant("products in bfloat16", precision="bfloat16"),
        Mutant(
            "scales in rows",
            applies=has("q_scale"),
            scales_of=lambda scales, rows, count: scales[: rows * count].view(rows, count),
        ),
        altered("another factor of all queries", "q_global_scale", change=lambda scale: scale * 1.02),
    ),
    causal=True,
    where="h % g == 0; d % 8 == 0",  # codes come in pairs, scales by sixteen
    **ON_PAGES,
)
TRTLLM_PAGED = Attention("trtllm_paged", causal=True, **ON_PAGES)
CUDNN_PAGED, XQA, BLOCK_SPARSE, MSA_SPARSE, DCP = (
    Attention(op_type, **ON_PAGES)
    for op_type in ("cudnn_paged", "xqa", "block_sparse", "msa_sparse", "trtllm_paged_dcp_spec")
)

# Calls of FlashInfer's functions, with a definition's inputs by name; functions `for_` return further arguments.

WORKSPACE = 128 << 20  # bytes
SM100, SM120 = ((10, 0), (12, 9)), ((12, 0), (12, 9))


def scratch(inputs: Given) -> dict[str, Any]:
    """Memory to work in, on the queries' device."""
    q = one_of(QUERIES, inputs)
    return {"workspace_buffer": torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)}


def for_xqa(inputs: Given) -> dict[str, Any]:
    """For XQA: memory to work in, an output, semaphores, and sizes of the cache."""
    return {
        **scratch(inputs),
        "seq_lens": inputs["seq_lens"].to(torch.uint32),
        "output": torch.empty_like(inputs["q"]),
        "semaphores": torch.zeros(8 << 20, dtype=torch.uint32, device=inputs["q"].device),
        "num_kv_heads": inputs["k_cache"].shape[2],
        "page_size": inputs["k_cache"].shape[1],
    }


def for_context(inputs: Given) -> dict[str, Any]:
    """For prefill with tables: the longest sequences, and the offsets of their keys."""
    return {
        **scratch(inputs),
        "max_q_len": int(inputs["cum_seq_lens_q"].diff().max()),
        "max_kv_len": int(inputs["seq_lens"].max()),
        "batch_size": len(inputs["seq_lens"]),
        "cum_seq_lens_kv": torch.nn.functional.pad(inputs["seq_lens"].cumsum(0), (1, 0)).int(),
        "sinks": None if inputs.get("sinks") is None else [inputs["sinks"]],
    }


def for_speculation(inputs: Given) -> dict[str, Any]:
    """For decode of draft tokens: both caches as one argument, the longest sequence, queries per sequence."""
    return {
        **scratch(inputs),
        "kv_cache": (inputs["k_cache"], inputs["v_cache"]),
        **dict.fromkeys(("k_cache", "v_cache")),
        "max_seq_len": int(inputs["seq_lens"].max()),
        "q_len_per_req": len(inputs["query"]) // len(inputs["seq_lens"]),
        "return_lse": True,
    }


def for_cudnn(inputs: Given) -> dict[str, Any]:
    """For cuDNN's prefill: lengths [batch, 1, 1, 1], the longest ones, and the offsets of queries."""
    return {
        **scratch(inputs),
        "max_token_per_sequence": int(inputs["actual_seq_lens_q"].max()),
        "max_sequence_kv": int(inputs["actual_seq_lens_kv"].max()),
        **{name: inputs[name].view(-1, 1, 1, 1) for name in ("actual_seq_lens_q", "actual_seq_lens_kv")},
        "batch_offsets_q": torch.nn.functional.pad(inputs["actual_seq_lens_q"].cumsum(0), (1, 0)).int(),
        "batch_offsets_units": "tokens",
        "causal": bool(inputs.get("causal")),
        "return_lse": True,
    }


def for_cudnn_decode(inputs: Given) -> dict[str, Any]:
    """For cuDNN's decode: `max_sequence_kv` as the number of keys of each sequence."""
    table, most = inputs["block_tables"], int(inputs["max_sequence_kv"])
    return {**scratch(inputs), "actual_seq_lens_kv": torch.full((len(table),), most, device=table.device).int()}


def for_packed(inputs: Given) -> dict[str, Any]:
    """For packed queries, keys and values: the layout, the lengths, and the longest one."""
    lengths = inputs["cum_seq_lens_kv"].diff()
    most = int(lengths.max())
    sizes = {"max_q_len": most, "max_kv_len": most, "batch_size": len(lengths)}
    return {**scratch(inputs), **sizes, "input_layout": "PACKED_QKV", "seq_lens": lengths}


def packed_modules(definition: Definition, _: tuple[int, int]) -> tuple[Module]:
    """The kernels for packed queries, keys and values, without those for biases, caps and softmax statistics."""
    unused = r"_(alibi|skipSoftmax|softcapping|softmax)_"
    return (Module("gen_fmha_v2", ("PACKED_QKV", f"torch.{definition.inputs['qkv'].dtype}"), unused),)


def for_proxy(inputs: Given) -> dict[str, Any]:
    """For scores of blocks: whether there is a causal mask; there is one by default."""
    return {"causal": bool(inputs.get("causal", True))}


def for_lists(inputs: Given) -> dict[str, Any]:
    """For lists of blocks: whether there is a causal mask; there is none by default."""
    return {"causal": bool(inputs.get("causal"))}


def pattern(definition: Definition, inputs: Given) -> dict[str, Any]:
    """Arguments of block-sparse calls: block sizes, bits as uint32, and whether key heads share one pattern.

    Patterns have a head axis of 1 or of all key heads, after the batch's; keys [batch keys heads channels].
    """
    sizes = {name: definition.const_axes.get(name) for name in ("q_block_size", "kv_block_size")}
    words = [name for name in ("exact_block_bits", "kv_valid_bits") if inputs.get(name) is not None]
    bits = {name: inputs[name].view(torch.uint32) for name in words}
    one_pattern = one_of(BLOCKED, inputs).shape[1] == 1 and one_of(QUERIES, inputs).shape[2] > 1
    return {**sizes, **bits, "share_pattern_across_kv_heads": one_pattern}


BLOCKS, PAGED_BLOCKS = (
    f"flashinfer.attention.prims_ts.block_sparse:block_sparse_attention{rest}"
    for rest in ("", "_with_paged_kv_cache")
)
GEOMETRY = "[q_block_size] [kv_block_size] [kv_valid_bits] [mask_type] [sm_scale] -> output"
IN_PAGES = f"q k_cache v_cache block_tables seq_lens_kv block_indptr block_indices {GEOMETRY}"
WHOLE = f"q k v [block_indptr] [block_indices] [exact_block_bits] [k_summary] [v_summary] {GEOMETRY}"


@BLOCK_SPARSE.truth(
    "flashinfer", "block_sparse_attention_with_paged_kv_cache", PAGED_BLOCKS, serves=IN_PAGES, rows=None, sm=SM100
)
@BLOCK_SPARSE.truth("flashinfer", "block_sparse_attention", BLOCKS, serves=WHOLE, rows=None, sm=SM100)
def _flashinfer_blocks(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Block-sparse attention over pages, or, with lists or bits of blocks, over keys in one piece."""
    [attend] = api.values()
    lists = {name: inputs.get(name) for name in ("block_indptr", "block_indices")}
    if "block_tables" in inputs:
        names = ["q", "sm_scale", "block_tables", "seq_lens_kv"]
        cache = (inputs["k_cache"], inputs["v_cache"])
        form: dict[str, Any] = {"paged_kv_cache": cache, "max_seq_len_kv": int(inputs["seq_lens_kv"].max())}
    else:
        names = ["q", "sm_scale", "k", "v", "k_summary", "v_summary"]
        kind = "bsr" if "block_indptr" in inputs else "bitmask"
        form = {"sparse_format": kind, "use_proxy_routes": "k_summary" in inputs}
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    return {"output": attend(**given, **lists, **form, **pattern(definition, inputs))}


XQA.called(
    "xqa:xqa",
    "q k_cache v_cache page_table seq_lens -> output",
    dtypes=frozenset({"float16", "bfloat16"}),
    sm=((9, 0), (12, 9)),
    more=for_xqa,
)
TRTLLM_PAGED.called(
    "prefill:trtllm_batch_context_with_kv_cache",
    "query kv_cache block_tables seq_lens bmm1_scale bmm2_scale cum_seq_lens_q [window_left] [sinks] -> output",
    sm=SM100,
    more=for_context,
)
DCP.called(
    "decode:trtllm_batch_decode_with_kv_cache",
    "query k_cache v_cache block_tables seq_lens bmm1_scale bmm2_scale causal_seqlens_kv_global cp_world cp_rank"
    " -> output lse",
    sm=SM100,
    more=for_speculation,
)
CUDNN_PAGED.called(
    "cudnn:cudnn_batch_prefill_with_kv_cache",
    "q k_cache v_cache scale actual_seq_lens_q actual_seq_lens_kv block_tables [causal] -> output lse",
    accepts=lambda definition: dim(definition, "q", 2) == 128,  # the only width without cuDNN's own graphs
    sm=SM80,
    more=for_cudnn,
)
CUDNN_PAGED.called(
    "cudnn:cudnn_batch_decode_with_kv_cache",
    "q k_cache v_cache scale max_sequence_kv block_tables [q_len_per_req] [window_left] [sinks] -> output",
    accepts=lambda definition: dim(definition, "q", 2) == 128,
    sm=((9, 0), (12, 9)),
    more=for_cudnn_decode,
)
TRTLLM_PAGED.called(
    "prefill:trtllm_fmha_v2_prefill",
    "qkv bmm1_scale bmm2_scale cum_seq_lens_q cum_seq_lens_kv -> output",
    accepts=lambda definition: len(definition.inputs["qkv"].shape or ()) == 4,
    modules=packed_modules,
    sm=((9, 0), (12, 9)),
    more=for_packed,
)
for _name, _inputs, _width in (
    ("msa_proxy_score", "q k", 128),
    ("msa_proxy_score_fp4", "q_fp4 k_fp4 q_scale k_scale q_global_scale k_global_scale", 64),
):
    MSA_PROXY.called(
        f"msa_ops:{_name}",
        f"{_inputs} cu_seqlens_q cu_seqlens_k [causal] -> max_score",
        accepts=lambda definition, width=_width: calls.value_width(definition) == width,  # type: ignore[misc]
        sm=SM120,
        more=for_proxy,
    )
MSA_SPARSE.called(
    "msa_ops:msa_sparse_attention",
    "q k v q2k_indices cu_seqlens_q cu_seqlens_k [causal] [softmax_scale] -> output",
    sm=SM100,
    more=for_lists,
)

# Attention of one request, its keys and values in one piece: causal or not, window, soft cap, sinks, masks. A
# custom mask [n l] says which keys a query sees; slopes of ALiBi times the distance of a key are added to logits.


class Single(Attention):
    """One sequence. In float32 the weights are rounded to bfloat16 before they meet the values, as kernels do."""

    formula: Formula = staticmethod(partial(attention, lost=False, weights="bfloat16"))

    def planned_of(self, definition: Definition, sizes: Sequence[str], seed: int) -> Iterator[Planned]:
        """Plans in which only adversarial cases lean to keys, since this attention may be trained with.

        Where one key has half the weight, unfused attention in 16 bits loses more of a gradient than is allowed.
        """
        for name, kv_lens, q_lens, more in super().planned_of(definition, sizes, seed):
            plain = {} if name.startswith("adversarial") else {"pattern": "plain"}
            yield name, kv_lens, q_lens, plain | dict(more)
        yield "adversarial-prompt", [65], 65, {}
        yield "adversarial-lean", [223], 11, {}

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """One sequence of `count` keys."""
        del long
        return super().of_size(definition, case, count, long=True)

    def at_once(self, definition: Definition, *, long: bool) -> bool:
        """Whether no output has a var axis: then there is one query."""
        del long
        return not any({*(spec.shape or ())} & {*definition.var_axes} for spec in definition.outputs.values())


ALONE: Any = {
    "family": "attention",
    "compiles_late": ("torch",),
    "coupled": True,
    "mutants": (
        *MUTANTS,
        altered("mask not looked at", "custom_mask", change=lambda mask: torch.ones_like(mask)),
        altered("mask of the query before", "custom_mask", change=lambda mask: mask.roll(1, 0)),
        altered("ALiBi dropped", "alibi_slopes", change=lambda slopes: slopes * 0),
        altered("slopes of the next head", "alibi_slopes", change=lambda slopes: slopes.roll(1)),
        Mutant(
            "queries in the opposite order",
            applies=lambda wide: wide.given("q").dim() > 2 and len(wide.given("q")) > 1,
            outputs=lambda _, found: {"output": found["output"].flip(0)},
        ),
    ),
}
SINGLE_PREFILL = Single(
    "single_prefill",
    rules=(
        Rule(
            name="causal",
            label="causal mask",
            assigned=("causal",),
            described=((r"\bnon-?causal\b|\bnot causal\b", 0), (r"(?<!non-)(?<!not )(?<!optional )\bcausal", 1)),
            named=((r"_causal(?:_|$)", 1),),
            defaults={"prefill.single_prefill_with_kv_cache": ("causal", 0)},
            usual=0,
        ),
    ),
    **ALONE,
)
SINGLE_DECODE = Single("single_decode", **ALONE)
BARE = "q k v [sm_scale] -> output"
BENT = "q k v [sm_scale] [logits_soft_cap] [window_left] [custom_mask] -> output"
SUNK = "q k v [sm_scale] [logits_soft_cap] [window_left] [sinks] [custom_mask] [alibi_slopes] -> output"
PREFILL = "prefill.single_prefill_with_kv_cache", "flashinfer.prefill:single_prefill_with_kv_cache"
DECODE = "decode.single_decode_with_kv_cache", "flashinfer.decode:single_decode_with_kv_cache"
SDPA = ("functional.scaled_dot_product_attention", "attention")


@SINGLE_PREFILL.truth("flashinfer", *PREFILL, serves=BENT, sm=SM75)
@SINGLE_DECODE.truth("flashinfer", *DECODE, serves=BENT, rows=None, sm=SM75)
def _flashinfer_alone(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """By keyword what the definition has; only a prefill knows whether it is causal."""
    [attention] = api.values()
    names = ("sm_scale", "logits_soft_cap", "window_left", "custom_mask")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if inputs["q"].dim() > 2:
        given["causal"] = bool(definition.constants.get("causal"))
    return {"output": attention(inputs["q"], inputs["k"], inputs["v"], **given)}


SINGLE_PREFILL.truth("torch", *SDPA, serves=BARE, rows=None)(by_sdpa_alone)
SINGLE_DECODE.truth("torch", *SDPA, serves=BARE, rows=None)(by_sdpa_alone)
SINGLE_PREFILL.truth("torch", "softmax", SOFTMAX, serves=SUNK, rows=None)(by_softmax)
