"""Attention over sequences: paged or end to end, of grouped heads or latent, decode or causal prefill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

from traceproof.dataset.constants import Rule
from traceproof.lazy import torch
from traceproof.models.drafts import Choice, Draft, Extraction, Facts, call_of, draft, texts
from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading
from traceproof.ops.adapter import SM80, Api, Definition, Given, Outputs, asked, dim, dtype_of, scalar, tensor
from traceproof.ops.adapter import Module as Compiled
from traceproof.ops.attention import attention, flattened, has_tokens_first, is_causal, layout_of
from traceproof.ops.attention_op import Attention
from traceproof.ops.base import Tensors
from traceproof.ops.compare import Exact
from traceproof.ops.formats import DOWN, E4M3
from traceproof.ops.formula import Form, Mutant, Part, Wide, has, same
from traceproof.ops.op import Op
from traceproof.reasons import Skip, Unavailable

MAY_BE_NON_CAUSAL = Rule(
    name="causal",
    label="causal mask",
    assigned=("causal",),
    described=((r"\bnon-?causal\b|\bnot causal\b|\bbidirectional\b", 0),),
    named=((r"_non_?causal(?:_|$)", 0), (r"(?<!_non)_causal(?:_|$)", 1)),
)
STAGED: Any = {"rules": (MAY_BE_NON_CAUSAL,), "staged": True}
TABLE = "qo_indptr[i]? kv_indptr[j] kv_indices[x] kv_last_page_len[b]? sm_scale return_lse?"
BENT = "window_left? logits_soft_cap? sinks[h]?"  # of Gemma and gpt-oss
GQA_PAGED = Attention(
    "gqa_paged",
    Form(f"q[t h d] k_cache[p s g d] v_cache[p s g e] {TABLE} {BENT} -> output[t h e] lse[t h]", attention),
    family="gqa",
    slow=True,
    **STAGED,
)
END_TO_END = Form(
    f"q[t h d] k[n g d] v[n g e] qo_indptr[i] kv_indptr[j] sm_scale return_lse? {BENT} -> output[t h e] lse[t h]",
    attention,
)
GQA_RAGGED = Attention("gqa_ragged", END_TO_END, family="gqa", causal=True, **STAGED)
# before absorption, where keys are wider than values
MLA_RAGGED = Attention("mla_ragged", END_TO_END, family="mla", causal=True, **STAGED)
# Absorbed: logits q_nope . ckv + q_pe . kpe, values ckv, so that the output stays in the compressed space.
NOPE = 128  # channels of a key's part that is not rotated, where no axis says how many


def side_by_side(wide: Wide, *, turned: bool = False, shared: Part = same, code: Part = E4M3.round) -> Tensors:
    """Keys [k_nope | k_rope], the rotated part being the same for all heads; in the fp8 form also the values.

    There `kv_nope` holds each head's k_nope and value side by side. Mutants exchange the parts (`turned`), or
    change the rotated part (`shared`) or the rounding to fp8 (`code`).
    """
    if "k_nope" in wide:
        nope, rope = wide["k_nope"], shared(wide["k_rope"])
    else:
        nope, rope = wide["kv_nope"][..., :NOPE], shared(wide["k_pe"])[:, None]
    parts = [nope, rope.expand(*nope.shape[:2], -1)]
    keys = torch.cat(parts[::-1] if turned else parts, -1)
    if "k_nope" in wide:
        return {"k_out": keys}
    return {"key": code(keys), "value": code(wide["kv_nope"][..., NOPE:])}


def coded(**ways: Any) -> Part:  # noqa: ANN401 - of a format
    """A function that rounds through e4m3 codes, with these options of `Format.encode`."""
    return lambda x: E4M3.decode(E4M3.encode(x, **ways)).to(x.dtype)


KEY_PARTS = Op(
    "mla_paged",
    Form("k[t h x]? k_nope[t h n] k_rope[t g r] -> k_out[t h x]", side_by_side),
    Form("kv_nope[t h c] k_pe[t r] -> key[t h w] value[t h v]", side_by_side),
    sizes={"w": lambda size: NOPE + size["r"], "v": lambda size: size["c"] - NOPE},
    where="g in (1, h); x == n + r",
    adversarial={"large": {"scale": 300.0}, "tiny": {"scale": 2.0**-9}},
    gates=dict.fromkeys(("k_out", "key", "value"), Exact()),
    unusual={"large": ()},
    mutants=(
        Mutant("the rotated part first", turned=True),
        Mutant("the rotated part of the token before", shared=lambda rope: rope.roll(1, 0)),
        Mutant("the rotated part left out", shared=lambda rope: rope * 0),
        Mutant("codes cut off", applies=has("k_pe"), code=coded(rounding=DOWN)),
        Mutant("overflows are NaN", applies=has("k_pe"), code=coded(saturate=False)),
    ),
)
MLA_PAGED = Attention(
    "mla_paged",
    Form(
        f"q_nope[t h c] q_pe[t h R] ckv_cache[p s c] kpe_cache[p s R] {TABLE}"
        " ckv_scale? ckv_scale_arr[p s one]? kpe_scale? -> output[t h c] lse[t h]",
        attention,
    ),
    family="mla",
    other_forms=(KEY_PARTS,),
    uneven="c",
    **STAGED,
)
BY_PLAN = "[window_left] [logits_soft_cap]"  # that FlashInfer's wrappers take when they plan
GQA = "q k_cache v_cache kv_indptr kv_indices sm_scale [kv_last_page_len] [return_lse]"  # all calls return the LSE
MLA = (
    "q_nope q_pe ckv_cache kpe_cache kv_indptr kv_indices sm_scale [kv_last_page_len] [return_lse] "
    "[ckv_scale] [ckv_scale_arr] [kpe_scale]"
)
RAGGED = "q k v qo_indptr kv_indptr sm_scale [return_lse] -> output lse"


def unscaled(definition: Definition) -> bool:
    """Whether the cache has no scales: an fp8 cache may have some, and no adapter here takes them."""
    return not definition.inputs["ckv_cache"].dtype.startswith("float8") or "ckv_scale" not in definition.inputs


def unseeing(q: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, LSE) of queries that see no key: 0 in their dtype [T, Hq, Dv], -inf in float32 [T, Hq]."""
    output = torch.zeros((*q.shape[:2], values.shape[-1]), dtype=q.dtype, device=q.device)
    return output, torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)


# FlashInfer

WORKSPACE = 128 << 20  # bytes, FlashInfer's recommended size; zeros, as its documentation asks for
OLD_INFINITY = -5e4  # what FlashInfer up to 0.6 gave for minus infinity
MERGED_LOG2 = 10.0  # log2 of the most partial results (1024) that a row without keys is merged from
OTHER_MASKS = r"_kernel_mask_[23]$"  # sources for masks that are handed over and for several items: unused here
HOPPER = (9, 0)  # the only capability with FA3 kernels
# Query heads per key head that the CUDA-core decode kernel has in every version; others go through tensor cores.
CUDA_CORE_RATIOS = frozenset({1, 2, 3, 4, 8})


def workspace(device: torch.device) -> torch.Tensor:
    """A workspace of FlashInfer's attention: WORKSPACE zero bytes."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def backend(capability: tuple[int, int]) -> str:
    """The backend that `auto` would pick, named so that the kernel built in advance is the one that is called."""
    return "fa3" if capability == HOPPER else "fa2"


def wrapper_of(api: Api, key: str, device: torch.device, *layout: str) -> Any:  # noqa: ANN401 - FlashInfer's object
    """A wrapper object of FlashInfer, with a workspace and the backend for the GPU."""
    return api[key](workspace(device), *layout, backend=backend(torch.cuda.get_device_capability(device)))


def dtypes(definition: Definition, *names: str) -> list[str]:
    """Inputs' dtypes as arguments of a compiled module."""
    return [str(dtype_of(definition.inputs[name])) for name in names]


def window_and_cap(definition: Definition) -> tuple[bool, bool]:
    """Whether a definition has a window, and a soft cap."""
    return "window_left" in definition.inputs, "logits_soft_cap" in definition.inputs


def plan_options(inputs: Given, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a wrapper's `plan`: dtypes, the softmax scale, a window and a soft cap."""
    kinds = {"sm_scale": float, "window_left": int, "logits_soft_cap": float}
    numbers = {name: kind(inputs[name]) for name, kind in kinds.items() if inputs.get(name) is not None}
    return {"q_data_type": q.dtype, "kv_data_type": k.dtype, **numbers}


def prefill_module(definition: Definition, which: str) -> tuple[Compiled]:
    """The prefill kernel to compile, without position encoding or fp16 reduction, which no definition has."""
    generator = "gen_prefill_fa2" if which == "fa2" else "gen_prefill"
    q, kv, index = dtypes(definition, "q", layout_of(definition.inputs).keys[0], "kv_indptr")
    values = "v" if "v" in definition.inputs else "q"  # of pages, keys and values are equally wide
    widths = [dim(definition, name, -1) or 0 for name in ("q", values)]
    return (
        Compiled(generator, (which, q, kv, q, index, *widths, 0, *window_and_cap(definition), False), OTHER_MASKS),
    )


def flashinfer_outputs(definition: Definition, inputs: Given, returned: Sequence[torch.Tensor]) -> Outputs:
    """The definition's outputs out of what FlashInfer's attention returned, (output, lse in base 2).

    FlashInfer up to 0.6 gives a row without keys an lse of OLD_INFINITY plus log2 of the number of partial results
    that the row was merged from. It becomes minus infinity. The lse of rows with keys is unchanged, however low.
    """
    output, lse = returned
    bounds = tensor(inputs, "kv_indptr")
    empty = bounds[1:] == bounds[:-1]
    if "qo_indptr" in inputs:  # prefill: a row per query, not per sequence
        empty = empty.repeat_interleave(tensor(inputs, "qo_indptr").diff())
    no_keys = empty[:, None] & (lse <= OLD_INFINITY + MERGED_LOG2)
    return asked(definition, output=output, lse=lse.masked_fill(no_keys, -math.inf))


def last_page_lengths(inputs: Given, page_size: int) -> torch.Tensor:
    """Tokens in each row's last page, 0 for a row without pages.

    A definition with one token per page has no such input, and FlashInfer computes as if a row without pages
    had as many tokens as the length of its last page.
    """
    pages = tensor(inputs, "kv_indptr").diff()
    lengths = inputs.get("kv_last_page_len")
    lengths = torch.full_like(pages, page_size) if lengths is None else lengths.to(pages.dtype)
    return torch.where(pages > 0, lengths[: len(pages)], torch.zeros_like(pages))


def ratio_of(definition: Definition) -> int:
    """Query heads per key head; 0: the definition does not fix them, they do not divide, or are before tokens."""
    layout = layout_of(definition.inputs)
    if not has_tokens_first(definition):
        return 0
    heads = dim(definition, layout.queries[0], -2) or 0
    kv_heads = 1 if layout.latent else dim(definition, layout.keys[0], -2)
    return heads // kv_heads if kv_heads and heads % kv_heads == 0 else 0


def fixed(*places: tuple[str, int]) -> Callable[[Definition], bool]:
    """A condition for `accepts`: whether the definition has constant sizes of these axes, (input, axis)."""
    return lambda definition: all(dim(definition, name, axis) for name, axis in places)


def grouped(definition: Definition) -> bool:
    """Whether FlashInfer's kernels have such heads: q [., ., D], k_cache of 4 axes, whole ratio of heads."""
    ranks = [len(definition.inputs[name].shape or ()) for name in ("q", "k_cache")]
    return ranks == [3, 4] and fixed(("q", 2), ("k_cache", 1))(definition) and ratio_of(definition) > 0


def decode_modules(definition: Definition, _: tuple[int, int]) -> tuple[Compiled, ...]:
    """What decode compiles: its own kernel, or that of prefill where it goes through tensor cores."""
    if ratio_of(definition) not in CUDA_CORE_RATIOS:
        return prefill_module(definition, "fa2")
    q, kv, index = dtypes(definition, "q", "k_cache", "kv_indptr")
    width = dim(definition, "q", 2)
    return (Compiled("gen_decode", (q, kv, q, index, width, width, 0, *window_and_cap(definition))),)


PREFILL: Any = {"modules": lambda definition, sm: prefill_module(definition, backend(sm)), "sm": SM80}


@GQA_PAGED.truth(
    "flashinfer",
    "BatchDecodeWithPagedKVCacheWrapper",
    "decode",
    serves=f"{GQA} {BY_PLAN} -> output lse",
    accepts=grouped,
    modules=decode_modules,
    sm=SM80,
)
@GQA_PAGED.truth(
    "flashinfer",
    "BatchPrefillWithPagedKVCacheWrapper",
    "prefill_paged",
    serves=f"{GQA} {BY_PLAN} qo_indptr -> output lse",
    accepts=grouped,
    **PREFILL,
)
def _flashinfer_paged(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Prefill if there is a qo_indptr, else decode; FlashInfer's (output, base-2 LSE) by name."""
    q, k, v = inputs["q"], inputs["k_cache"], inputs["v_cache"]
    _, page, kv_heads, _ = k.shape
    table = (inputs["kv_indptr"], inputs["kv_indices"], last_page_lengths(inputs, page))
    sizes = (q.shape[1], kv_heads, q.shape[2], page)
    if "qo_indptr" in inputs:
        wrapper = wrapper_of(api, "prefill_paged", q.device, "NHD")
        wrapper.plan(
            inputs["qo_indptr"], *table, *sizes, causal=is_causal(definition, {}), **plan_options(inputs, q, k)
        )
    else:
        on_tensor_cores = ratio_of(definition) not in CUDA_CORE_RATIOS
        wrapper = api["decode"](workspace(q.device), "NHD", use_tensor_cores=on_tensor_cores)
        wrapper.plan(*table, *sizes, pos_encoding_mode="NONE", **plan_options(inputs, q, k))
    return flashinfer_outputs(definition, inputs, wrapper.run(q, (k, v), return_lse=True))


RAGGED_CALL: Any = {
    "serves": f"q k v qo_indptr kv_indptr sm_scale [return_lse] {BY_PLAN} -> output lse",
    "accepts": fixed(*((name, axis) for name in "qkv" for axis in (-1, -2))),
    **PREFILL,
}


@GQA_RAGGED.truth("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper", "prefill_ragged", **RAGGED_CALL)
@MLA_RAGGED.truth("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper", "prefill_ragged", **RAGGED_CALL)
def _flashinfer_ragged(api: Api, definition: Definition, inputs: Given) -> Outputs:
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    wrapper = wrapper_of(api, "prefill_ragged", q.device, "NHD")
    bounds, sizes = (inputs["qo_indptr"], inputs["kv_indptr"]), (q.shape[1], k.shape[1], q.shape[2])
    options = {"head_dim_vo": v.shape[2], "causal": is_causal(definition, {}), **plan_options(inputs, q, k)}
    wrapper.plan(*bounds, *sizes, **options)
    return flashinfer_outputs(definition, inputs, wrapper.run(q, k, v, return_lse=True))


def latent_modules(definition: Definition, capability: tuple[int, int]) -> tuple[Compiled, ...]:
    """The kernel that latent attention compiles."""
    q, kv, index = dtypes(definition, "q_nope", "ckv_cache", "kv_indptr")
    widths = (dim(definition, "ckv_cache", 2), dim(definition, "kpe_cache", 2))
    return (Compiled("gen_mla", (backend(capability), q, kv, q, index, *widths, False)),)


def unaligned(_: Api, definition: Definition) -> Unavailable | None:
    """Why the kernels for this GPU do not take a definition's widths; None: they do."""
    widths = dim(definition, "ckv_cache", 2) or 0, dim(definition, "kpe_cache", 2) or 0
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if here != HOPPER or not (widths[0] % 128 or widths[1] % 64):
        return None
    return Unavailable(Skip.NO_ADAPTER, f"fa3 takes widths in multiples of 128 and 64, and these are {widths}")


@MLA_PAGED.truth(
    "flashinfer",
    "BatchMLAPagedAttentionWrapper",
    "mla",
    serves=f"{MLA} [qo_indptr] -> output lse",
    accepts=lambda definition: fixed(("ckv_cache", 1), ("ckv_cache", 2))(definition) and unscaled(definition),
    modules=latent_modules,
    refuses=unaligned,
    sm=SM80,
)
def _flashinfer_latent(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """MLA over pages. `lengths` are each sequence's tokens; in decode each has one query."""
    q_nope, q_pe, ckv, kpe = (tensor(inputs, name) for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache"))
    pages, page = tensor(inputs, "kv_indptr").diff(), ckv.shape[1]
    lengths = torch.clamp(pages - 1, min=0) * page + last_page_lengths(inputs, page)
    one_each = torch.arange(len(pages) + 1, dtype=torch.int32, device=q_nope.device)
    queries = inputs.get("qo_indptr", one_each)
    table = (inputs["kv_indptr"], inputs["kv_indices"], lengths.to(torch.int32))
    sizes = (q_nope.shape[1], q_nope.shape[2], q_pe.shape[2], page)
    wrapper = wrapper_of(api, "mla", q_nope.device)
    causal, scale = is_causal(definition, {}), scalar(inputs, "sm_scale")
    wrapper.plan(queries, *table, *sizes, causal, scale, q_nope.dtype, ckv.dtype)
    return flashinfer_outputs(definition, inputs, wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True))


# PyTorch and SGLang read a cache token by token, so page tables become token indices: `flattened`.

SDPA = ("scaled_dot_product_attention", "attention", "attention_kernels")


@GQA_PAGED.truth("torch", *SDPA, serves=f"{GQA} [qo_indptr] -> output lse", accepts=has_tokens_first)
@MLA_PAGED.truth("torch", *SDPA, serves=f"{MLA} [qo_indptr] -> output lse", accepts=unscaled)
@GQA_RAGGED.truth("torch", *SDPA, serves=RAGGED)
@MLA_RAGGED.truth("torch", *SDPA, serves=RAGGED)
def by_sdpa(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Attention per sequence by PyTorch, without cuDNN's kernels, which compile a plan per shape, seconds each."""
    from torch.nn.attention import SDPBackend

    q, k, v, rows = flattened(inputs)
    output, lse = unseeing(q, v)
    causal, scale, share = is_causal(definition, {}), scalar(inputs, "sm_scale"), q.shape[1] // k.shape[1]
    bounds = tensor(inputs, "qo_indptr").tolist() if "qo_indptr" in inputs else list(range(len(rows) + 1))
    for (start, stop), tokens in zip(pairwise(bounds), rows, strict=True):
        first = max(start, stop - len(tokens)) if causal else start  # queries before it see nothing
        if first >= stop or not len(tokens):
            continue
        queries = q[first:stop].transpose(0, 1)[None]
        keys, values = (x[tokens].transpose(0, 1).repeat_interleave(share, 0)[None] for x in (k, v))
        mask = None
        if causal:  # the last query sees all
            last = torch.arange(first, stop, device=q.device)[:, None] + (len(tokens) - stop)
            mask = torch.arange(len(tokens), device=q.device)[None] <= last
        with api["attention_kernels"]([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            attended = api["attention"](queries, keys, values, attn_mask=mask, scale=scale)
        logits = (queries.float() @ keys.float().transpose(-1, -2))[0] * scale
        if mask is not None:
            logits = logits.masked_fill(~mask, -math.inf)
        output[first:stop] = attended[0].transpose(0, 1)
        lse[first:stop] = (torch.logsumexp(logits, -1) / math.log(2)).transpose(0, 1)
    return asked(definition, output=output, lse=lse)


@GQA_RAGGED.truth("torch", *SDPA[:2], serves="q k v -> output", rows=None)
def by_sdpa_alone(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """SDPA of one sequence; the query of a decode [heads, channels] is taken as one token."""
    q, k, v, scale = inputs["q"], inputs["k"], inputs["v"], inputs.get("sm_scale")
    queries = q.reshape(-1, *q.shape[-2:])
    mask = None
    if is_causal(definition, {}):  # the last query sees all
        place = torch.arange(len(queries), device=q.device)[:, None] + len(k) - len(queries)
        mask = torch.arange(len(k), device=q.device)[None] <= place
    heads = (x.transpose(0, 1).unsqueeze(0) for x in (queries, k, v))
    scale = None if scale is None else float(scale)
    output = api["attention"](*heads, scale=scale, enable_gqa=True, attn_mask=mask)
    return {"output": output.squeeze(0).transpose(0, 1).reshape(*q.shape[:-1], v.shape[-1])}


CAT = "torch:cat"


@MLA_PAGED.truth("torch", "cat", CAT, serves="k_nope k_rope [k] -> k_out", rows=None)
@MLA_PAGED.truth("torch", "cat in fp8", CAT, serves="kv_nope k_pe -> key value", rows=None)
def concatenated(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Concatenated keys; in the fp8 form keys and values, saturating."""
    if "k_nope" in inputs:
        nope, rope = inputs["k_nope"], inputs["k_rope"]
        return {"k_out": api[CAT]([nope, rope.expand(-1, nope.shape[1], -1)], -1)}
    both, rope = inputs["kv_nope"].clamp(-448, 448), inputs["k_pe"].clamp(-448, 448)[:, None]
    keys = api[CAT]([both[..., :128], rope.expand(-1, both.shape[1], -1)], -1)
    return {"key": keys.to(torch.float8_e4m3fn), "value": both[..., 128:].to(torch.float8_e4m3fn)}


SOFTMAX = "torch:softmax"
ALL_BENT = f"{BY_PLAN} [sinks]"
RAGGED_BENT = f"q k v qo_indptr kv_indptr sm_scale {ALL_BENT} -> output lse"


@GQA_PAGED.truth(
    "torch", "softmax", SOFTMAX, serves=f"{GQA} [qo_indptr] {ALL_BENT} -> output lse", accepts=has_tokens_first
)
@GQA_RAGGED.truth("torch", "softmax", SOFTMAX, serves=RAGGED_BENT)
@MLA_RAGGED.truth("torch", "softmax", SOFTMAX, serves=RAGGED_BENT)
def by_softmax(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """With a window, a cap, sinks, a mask or ALiBi: one softmax over a sequence's logits and each head's sink."""
    q, k, v, rows = flattened(inputs)
    output, lse = unseeing(q, v)
    share, scale = q.shape[1] // k.shape[1], inputs.get("sm_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    bounds = list(range(len(rows) + 1)) if "kv_indptr" in inputs else [0, len(q)]
    bounds = tensor(inputs, "qo_indptr").tolist() if "qo_indptr" in inputs else bounds
    for (start, stop), tokens in zip(pairwise(bounds), rows, strict=True):
        if start == stop or not len(tokens):
            continue
        keys, values = (x[tokens].float().repeat_interleave(share, 1) for x in (k, v))
        logits = torch.einsum("nhd,lhd->nhl", q[start:stop].float(), keys) * scale
        if inputs.get("logits_soft_cap") is not None:
            cap = scalar(inputs, "logits_soft_cap")
            logits = cap * torch.tanh(logits / cap)
        key = torch.arange(len(tokens), device=q.device)
        place = torch.arange(start, stop, device=q.device)[:, None] + (len(tokens) - stop)
        hidden = key > place if is_causal(definition, {}) else key < 0
        if inputs.get("alibi_slopes") is not None:
            logits = logits + inputs["alibi_slopes"][:, None] * (key - place)[:, None]
        if inputs.get("custom_mask") is not None:
            hidden = hidden | ~inputs["custom_mask"]
        if inputs.get("window_left") is not None:
            hidden = hidden | (key < place - int(scalar(inputs, "window_left")))
        logits = logits.masked_fill(hidden[:, None], -math.inf)
        if inputs.get("sinks") is not None:
            logits = torch.cat([logits, inputs["sinks"][:, None].expand(*logits.shape[:2], 1)], -1)
        weights = api[SOFTMAX](logits, -1)[..., : len(tokens)].nan_to_num(0.0)  # NaN where no key is seen
        output[start:stop] = torch.einsum("nhl,lhd->nhd", weights, values).to(q.dtype)
        lse[start:stop] = torch.logsumexp(logits, -1) / math.log(2)
    return asked(definition, output=output, lse=lse)


# SGLang's Triton attention: decode over a cache, and the extension of a cached prefix by new tokens. A query that
# sees no key is no case of a server and is not handed over.

SGLANG_DTYPES = frozenset({"float16", "bfloat16"})  # products of float32 would be TF32
SPLITS = 8  # parts that a row's keys are cut into, SGLang's default
TILE = 16  # query heads that a program of the decode kernel has
LATENT = frozenset({(576, 512), (288, 256)})  # widths at which values are the first part of a tile of keys
NARROWEST = 16  # channels that a tensor core multiplies


def fits_tensor_cores(definition: Definition) -> bool:
    """Whether the widths are const and fit a tensor core, and a latent cache has no scales."""
    layout = layout_of(definition.inputs)
    names = (*layout.queries, *layout.keys, layout.values)
    fit = all((dim(definition, name, -1) or 0) >= NARROWEST for name in names)
    return fit and (not layout.latent or unscaled(definition))


def extends(definition: Definition) -> bool:
    """Whether the extension kernel, which is causal, computes a definition."""
    return fits_tensor_cores(definition) and is_causal(definition, {}) and has_tokens_first(definition)


def heads_fit(definition: Definition) -> bool:
    """Whether the decode kernel has the heads right, and multiplies on tensor cores.

    Beyond TILE query heads per key head, a tile must not reach into the next key head's. Where each has a key head
    of its own, another kernel rounds every product of a query and a key to their dtype before it sums them.
    """
    ratio, latent = ratio_of(definition), layout_of(definition.inputs).latent
    one_head = latent or dim(definition, layout_of(definition.inputs).keys[0], -2) == 1
    return fits_tensor_cores(definition) and ratio > 1 and (ratio <= TILE or ratio % TILE == 0 or one_head)


def indptr(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Where each of some rows begins, and where the last one ends; int64, as offsets are multiplied with it."""
    return torch.tensor([0, *map(len, parts)], device=device).cumsum(0)


DECODE = ("sglang", "triton_ops.decode_attention_fwd", "decode_attention")
EXTEND = ("sglang", "triton_ops.extend_attention_fwd", "extend_attention")
ON_TRITON: Any = {"dtypes": SGLANG_DTYPES, "sm": SM80}


@GQA_PAGED.truth(*DECODE, serves=f"{GQA} -> output lse", accepts=heads_fit, **ON_TRITON)
@MLA_PAGED.truth(*DECODE, serves=f"{MLA} -> output lse", accepts=heads_fit, **ON_TRITON)
def _sglang_decode(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """One query per row [rows, heads, width], which sees all of the row's tokens.

    The kernel keeps the log-sum-exp of every part it cuts a row into, by e; the row's is put together here.
    """
    q, keys, values, tokens = flattened(inputs)
    output, lse = unseeing(q, values)
    seeing = [row for row, tokens_of_row in enumerate(tokens) if len(tokens_of_row)]
    if seeing:
        rows = torch.tensor(seeing, device=q.device)
        lists = [tokens[row] for row in seeing]
        queries = q[rows]
        shape = (*queries.shape[:2], SPLITS)
        parts = torch.full(shape, -math.inf, dtype=torch.float32, device=q.device)
        attended = torch.empty((*shape[:2], values.shape[-1]), dtype=q.dtype, device=q.device)
        scratch = torch.empty((*shape, values.shape[-1]), dtype=torch.float32, device=q.device)
        splits = torch.full(shape[:1], SPLITS, dtype=torch.int32, device=q.device)
        table, split = (indptr(lists, q.device), torch.cat(lists)), (scratch, parts, splits, SPLITS)
        scales, latent = (scalar(inputs, "sm_scale"), 1.0, 1.0), (keys.shape[-1], values.shape[-1]) in LATENT
        api["decode_attention"](queries, keys, values, attended, *table, *split, *scales, has_mla=latent)
        output[rows], lse[rows] = attended, torch.logsumexp(parts, -1) / math.log(2)
    return asked(definition, output=output, lse=lse)


@GQA_PAGED.truth(*EXTEND, serves=f"{GQA} qo_indptr -> output lse", accepts=extends, **ON_TRITON)
@MLA_PAGED.truth(*EXTEND, serves=f"{MLA} qo_indptr -> output lse", accepts=extends, **ON_TRITON)
@GQA_RAGGED.truth(*EXTEND, serves=RAGGED, accepts=extends, **ON_TRITON)
@MLA_RAGGED.truth(*EXTEND, serves=RAGGED, accepts=extends, **ON_TRITON)
def _sglang_extend(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Causal: the last query of a row sees all its tokens. The queries' own tokens are the last ones of the row.

    What comes before them is the cached prefix. With fewer tokens than queries, the first queries see none.
    """
    q, keys, values, rows = flattened(inputs)
    output, lse = unseeing(q, values)
    places, new, cached = [], [], []
    for (start, stop), row in zip(pairwise(tensor(inputs, "qo_indptr").tolist()), rows, strict=True):
        count = min(stop - start, len(row))
        places.append(torch.arange(stop - count, stop, device=q.device))
        new.append(row[len(row) - count :])
        cached.append(row[: len(row) - count])
    if any(map(len, new)):
        place, tokens = torch.cat(places), torch.cat(new)
        queries = q[place]
        attended = torch.empty((*queries.shape[:2], values.shape[-1]), dtype=q.dtype, device=q.device)
        natural = torch.empty(queries.shape[:2], dtype=torch.float32, device=q.device)
        extension = (queries, keys[tokens].contiguous(), values[tokens].contiguous(), attended)
        table = (indptr(new, q.device), indptr(cached, q.device), torch.cat(cached))
        masks = (None, True, None)  # custom_mask, is_causal, mask_indptr
        scales: Any = {"sm_scale": scalar(inputs, "sm_scale"), "lse_extend": natural}
        api["extend_attention"](*extension, keys, values, *table, *masks, max(map(len, new)), 1.0, 1.0, **scales)
        output[place], lse[place] = attended, natural / math.log(2)
    return asked(definition, output=output, lse=lse)


# Models

# Facts of transformers' attention, each with the value that says that there is none.
PLAIN: Mapping[str, Any] = {"window": None, "logit_cap": None, "sinks": False}


def read_attention(module: Any, parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
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
    parameters = getattr(parent, "_parameters", None)
    parameters = parameters if isinstance(parameters, dict) else getattr(parameters, "__dict__", {})
    attributes = {**getattr(parent, "__dict__", {}), **parameters}
    if any("sink" in name and value is not None for name, value in attributes.items()):
        facts["sinks"] = True
    if getattr(module, "use_irope", False):
        facts["chunks"] = True
    if getattr(parent, "use_dsa", False):
        facts["sparse"] = True
        facts["topk"] = getattr(getattr(parent, "indexer", None), "index_topk", None)
    return facts


def bends_of(facts: Mapping[str, Any]) -> Facts:
    """What of a window, in tokens with the query's own one, a soft cap and sinks an attention of SGLang's has."""
    window = facts["window"] or -1  # SGLang's is without the query's own token
    bends = {
        "window": window + 1 if window > 0 else None,
        "logit_cap": facts["logit_cap"] or None,
        "sinks": facts.get("sinks"),
    }
    return {name: value for name, value in bends.items() if value}


def no_form(facts: Mapping[str, Any]) -> str | None:
    """Why the dataset has no form for attention with these facts; None: it has one."""
    kinds = {"sparse": "sparse attention that is not absorbed", "chunks": "attention within chunks"}
    if what := next((text for name, text in kinds.items() if facts.get(name)), None):
        return f"{what}: no form"
    if "kv_lora_rank" in facts and bends_of(facts):
        return f"latent attention with {', '.join(bends_of(facts))}: no form"
    if "kv_lora_rank" not in facts and facts["qk_dim"] != facts["vo_dim"]:
        return f"attention of two widths: keys of {facts['qk_dim']}, values of {facts['vo_dim']}, no form"
    return None


def differs(sizes: Mapping[str, str], call: KernelCall, evidence: Evidence) -> str | None:
    """How transformers' attention differs from a call on one rank; None: not at all.

    `sizes` name its fact for each size of the call. Values are as wide as keys if the call has one width, `dim`.
    """

    def terms(facts: Mapping[str, Any]) -> Facts:
        named = {name: facts.get(fact) for name, fact in sizes.items()}
        for name in {"heads", "kv_heads"} & named.keys():  # with more ranks than KV heads, ranks hold copies
            named[name] = max(1, facts[name] // evidence.parallel.attention)
        widths = {"vo_dim": facts.get("vo_dim")} if "dim" in sizes else {}
        return {**named, **widths, **{name: facts[name] or nothing for name, nothing in PLAIN.items()}}

    one_width = {"vo_dim": call["dim"]} if "dim" in sizes else {}
    plain = {name: nothing for name, nothing in PLAIN.items() if name not in dict(call.facts)}
    return evidence.differs(call, "attention", terms, **one_width, **plain)


# Transformers' facts that are the sizes of absorbed attention.
LATENT_SIZES = {"heads": "heads", "ckv": "kv_lora_rank", "kpe": "qk_rope_head_dim"}

# By fact: the input that a definition has for it, and the part of the definition's name.
SOFTMAX_CHANGES = {
    "window": ("window_left", "window"),
    "logit_cap": ("logits_soft_cap", "capped"),
    "sinks": ("sinks", "sinks"),
}


def softmax_changes(call: KernelCall) -> tuple[Facts, set[str]]:
    """(values of a call's templates, tensors that its definitions lack), by what changes plain softmax attention.

    With sinks there is no log-sum-exp.
    """
    inputs = {input_: part for fact, (input_, part) in SOFTMAX_CHANGES.items() if fact in dict(call.facts)}
    values = {
        "attend": "attend_bent" if inputs else "attend",
        "bent": "".join(f"_{part}" for part in inputs.values()),
        "passed": "".join(f", {name}={name}" for name in inputs),
        "returned": "output" if "sinks" in inputs else "output, lse",
    }
    without = {input_ for input_, _ in SOFTMAX_CHANGES.values()} - inputs.keys()
    return values, without | ({"lse"} if "sinks" in inputs else set())


def paged(op_type: str, call: KernelCall, choice: Choice) -> Iterator[Draft]:
    """Drafts of decode and causal prefill per page size; pages of one token are always full."""
    changes, lacking = softmax_changes(call)
    for stage, size in product(("decode", "prefill"), choice.page_sizes):
        tokens, without = "len(pages)", {"kv_last_page_len"}
        if size > 1:
            tokens, without = "(len(pages) - 1) * PAGE_SIZE + int(kv_last_page_len[row])", set()
        without |= {"qo_indptr"} if stage == "decode" else set()
        values: Facts = {
            **dict(call.facts),
            "page_size": size,
            "stage": stage,
            "num_tokens": tokens,
            **texts(stage),
        }
        yield draft(op_type, op_type, values | changes, without=without | lacking)


def ragged(op_type: str, constants: Mapping[str, str], call: KernelCall, _: Choice) -> Iterator[Draft]:
    """Draft of causal prefill without pages; `constants` of the text are facts of the call."""
    changes, lacking = softmax_changes(call)
    yield draft(
        op_type, op_type, {name: call[fact] for name, fact in constants.items()} | changes, without=lacking
    )


def extraction(
    kind: str,
    drafts: Callable[[KernelCall, Choice], Iterator[Draft]],
    of: Callable[[Mapping[str, Any]], bool],
    sizes: Mapping[str, str],
    transformers: Mapping[str, str] | None = None,
) -> Extraction:
    """The Extraction of attention whose facts satisfy `of`; `sizes` name the facts that are the call's sizes.

    `transformers` are those of its facts, if it has other names for them.
    """

    def call(module: ModelModule, _: Reading) -> KernelCall | str | None:
        if not of(module.facts):
            return None
        named: Facts = {name: module.facts.get(fact) for name, fact in sizes.items()} | bends_of(module.facts)
        return no_form(module.facts) or call_of(module, kind, **named)

    return Extraction(
        readers={"RadixAttention": ("attention", read_attention)},
        calls={"attention": call},
        differs={kind: partial(differs, transformers or sizes)},
        drafts={kind: drafts},
    )


GQA_PAGED.extraction = extraction(
    "gqa",
    partial(paged, "gqa_paged"),
    lambda facts: "kv_lora_rank" not in facts,
    {"heads": "heads", "kv_heads": "kv_heads", "dim": "qk_dim"},
)
OF_GQA = {"num_qo_heads": "heads", "num_kv_heads": "kv_heads", "qk_dim": "dim", "vo_dim": "dim"}
GQA_RAGGED.extraction = Extraction(drafts={"gqa": partial(ragged, "gqa_ragged", OF_GQA)})
MLA_PAGED.extraction = extraction(
    "mla_absorbed",
    partial(paged, "mla_paged"),
    lambda facts: bool(facts.get("absorbed")),
    LATENT_SIZES | {"kpe": "rope_dim"},
    LATENT_SIZES,
)
OF_MLA = {"num_qo_heads": "heads", "num_kv_heads": "heads", "qk_dim": "qk", "vo_dim": "vo"}
MLA_RAGGED.extraction = extraction(
    "mla_ragged",
    partial(ragged, "mla_ragged", OF_MLA),
    lambda facts: "kv_lora_rank" in facts and not facts.get("absorbed"),
    {"heads": "heads", "qk": "qk_dim", "vo": "vo_dim"},
)
