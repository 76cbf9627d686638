"""Equivalent ways of computing the op_types, all of which the judge must pass: `variants_of(op_type)`.

The first one is mostly the op's formula in float32; the others sum in another order, take another function of
PyTorch, or keep in between what right kernels keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from traceproof.ops.attention import Operands, Precision, Span, attend, hiding, visible
from traceproof.ops.attention_op import each, seeing
from traceproof.ops.base import Tensors, dtype_of
from traceproof.ops.families.expert import Scaling, mixture_of, stored
from traceproof.ops.families.gdn import CHUNK
from traceproof.ops.families.layout import States
from traceproof.ops.families.norm import rms_norm
from traceproof.ops.families.product import matmul_in_blocks
from traceproof.ops.families.routing import Method, renormalised, routing_of, softmax, sum_one
from traceproof.ops.families.sparse import best
from traceproof.ops.formats import BLOCK as FP8_BLOCK
from traceproof.ops.formats import E2M1, FP4_BLOCK, FP8_MAX, in_blocks, to_bf16, to_fp8
from traceproof.ops.formula import Variant, Wide, has, same
from traceproof.ops.gates import sigmoid, softplus

PLAIN = Variant("float32, rounded once")
NORM_BY_PYTORCH = Variant("by PyTorch", norm=lambda x, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps))
FLOAT64 = Variant("float64, rounded once", precision="float64")
BLOCK = 16  # keys
FP4_MAX = 6.0


def requantise_fp8(values: torch.Tensor, block: int = FP8_BLOCK) -> torch.Tensor:
    """Values rounded to fp8 with a scale, amax / 448, per `block` of the last axis, and scaled back."""
    blocks = in_blocks(values, block)
    scale = blocks.abs().amax(-1, keepdim=True) / FP8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (to_fp8(blocks / scale) * scale).reshape(values.shape)


in_mxfp8 = partial(requantise_fp8, block=32)  # as activations are kept beside fp4 weights


def of_16_bits(wide: Wide) -> bool:
    """Whether the queries are float16 or bfloat16."""
    return wide.given(next(iter(wide.definition.inputs))).dtype.itemsize == 2


def of(names: str, *variants: Variant) -> Iterator[Variant]:
    """Variants that say nothing of a form without an input of one of these names."""

    def limited(one: Variant) -> Variant:
        found = copy(one)
        found.applies = lambda wide: any(name in wide for name in names.split()) and one.applies(wide)
        return found

    return map(limited, variants)


def of_softmax(wide: Wide) -> bool:
    """Whether experts are chosen by a softmax of their logits."""
    return wide.values.keys() == {"router_logits"}


def requantise_fp4(values: torch.Tensor) -> torch.Tensor:
    """What is left of `values` after nvfp4: blocks of 16 with an e4m3 scale under one float32 scale for all.

    Values made of e2m1 codes and powers of two, with a 6 in every block, come back unchanged; normal ones lose
    about a tenth of their RMS.
    """
    blocks = values.reshape(*values.shape[:-1], -1, FP4_BLOCK)
    peak = blocks.abs().amax(-1, keepdim=True)
    largest = float(peak.max()) if peak.numel() else 0.0
    whole = largest / (FP4_MAX * FP8_MAX) if largest > 0 else 1.0
    scale = to_fp8(peak / (FP4_MAX * whole)) * whole
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (E2M1.round(blocks / scale) * scale).reshape(values.shape)


def in_chunks(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The root mean square norm with its sum by parts of 48, in the opposite order."""
    parts = [(part * part).sum(-1, keepdim=True) for part in torch.split(x.flip(-1), 48, dim=-1)]
    return x / torch.sqrt(torch.stack(parts).cumsum(0)[-1] / x.shape[-1] + eps)


def by_reciprocal_root(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The root mean square norm by a reciprocal root."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def rounded_before_the_weight(wide: Wide) -> Tensors:
    """RMSNorm as models in plain PyTorch do it."""
    x = wide["hidden_states"] + wide["residual"] if "residual" in wide else wide["hidden_states"]
    y = rms_norm(x, wide.number("eps")).to(dtype_of(wide.definition.inputs["hidden_states"])).to(wide.dtype)
    return {"output": y * (wide["weight"] + wide.number("weight_offset")), "residual_out": x}


def is_bare_norm(wide: Wide) -> bool:
    """Whether nothing follows the weight."""
    return wide.values.keys() <= {"hidden_states", "residual", "weight"}


def is_drawn(wide: Wide) -> bool:
    """Whether tokens are drawn."""
    return not {"output", "masked_logits", "renormalized", "indices"} & wide.definition.outputs.keys()


def of_codes(wide: Wide) -> bool:
    """Whether rows end as fp4 codes."""
    return "y_fp4" in wide.definition.outputs


def by_squares(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The variance as the mean of squares less the square of the mean, in float64: in float32 it may cancel."""
    mean = x.double().mean(-1, keepdim=True)
    variance = (x.double() ** 2).mean(-1, keepdim=True) - mean**2
    return ((x - mean) * torch.rsqrt(variance + eps)).float()


def split(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Four partial products, added at the end."""
    return torch.stack([x @ y for x, y in zip(a.chunk(4, -1), b.chunk(4, -2), strict=True)]).sum(0)


def convolved(wide: Wide, *, backwards: bool = False) -> Tensors:
    """A causal convolution by PyTorch's grouped one, or its sum with the newest product first."""
    x, weights, held = wide["x"], wide["weight"], wide.maybe("conv_state")
    width = weights.shape[1]
    rows = torch.nn.functional.pad(x, (width - 1, 0))
    if held is not None:
        rows = torch.cat([held[..., 1:], x.unsqueeze(-1)], -1)
    total = torch.nn.functional.conv1d(rows, weights.unsqueeze(1), groups=len(weights))
    if backwards:
        length, total = total.shape[-1], torch.zeros_like(total)
        for place in reversed(range(width)):
            total = total + weights[:, place, None] * rows[..., place : place + length]
    total = total + (wide["bias"].reshape(-1, 1) if "bias" in wide else 0)
    output = total * sigmoid(total)
    return {"output": output} if held is None else {"output": output.squeeze(-1), "new_state": rows}


def one_by_one(cache: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
    """Write token by token."""
    for token, (page, row) in enumerate(zip(pages.tolist(), rows.tolist(), strict=True)):
        cache[page, row] = new[token]


def flat(cache: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
    """Write to the rows of all pages as one list."""
    cache.flatten(0, 1).index_copy_(0, pages * cache.shape[1] + rows, new)


def in_turn(v: torch.Tensor, s: torch.Tensor) -> States:
    """One state of attention after the other, as a kernel that streams them does."""
    out, level = v[:, 0], s[:, 0]
    for index in range(1, v.shape[1]):
        top = torch.maximum(level, s[:, index])
        finite = top.clamp_min(torch.finfo(s.dtype).min)
        old, new = torch.exp2(level - finite), torch.exp2(s[:, index] - finite)
        total = torch.where(top > -torch.inf, old + new, 1.0)
        out = (out * old.unsqueeze(-1) + v[:, index] * new.unsqueeze(-1)) / total.unsqueeze(-1)
        level = top + torch.log2(total)
    return out, level


def by_softmax(v: torch.Tensor, s: torch.Tensor) -> States:
    """States of attention merged by natural logarithms."""
    scaled = s * math.log(2.0)
    weights = torch.softmax(scaled, 1).nan_to_num(0.0).unsqueeze(-1)  # NaN where all states are empty
    return (v * weights).sum(1), torch.logsumexp(scaled.double(), 1).float() / math.log(2.0)


def head_by_head(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """An indexer's scores, the last head first."""
    total = torch.zeros_like(products[0])
    for head in reversed(range(len(weights))):
        total += weights[head] * torch.relu(products[head])
    return total


def best_of_tiles(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """The best of each tile of 1,024, then the best of these, in ascending order of place."""
    tiles = enumerate(torch.split(scores, 1024))
    candidates = torch.cat([1024 * index + best(tile, topk) for index, tile in tiles])
    return candidates[best(scores[candidates], topk)].sort().values


def inverse_transform(probs: torch.Tensor, trials: int, generator: torch.Generator) -> torch.Tensor:
    """Draws by the cumulative sum in float32, as kernels do it."""
    cdf = probs.float().cumsum(-1)
    wanted = torch.rand((len(probs), trials), generator=generator) * cdf[:, -1:]
    last = (probs > 0).sum(-1, keepdim=True) - 1
    return torch.minimum(torch.searchsorted(cdf, wanted, right=True), last)


def chunked(kind: str) -> Callable[[Wide], Tensors]:
    """The gated delta rule as a few matrix products and a triangular solve: operands in a dtype, sums in float32.

    Within a chunk the corrections U [C, V] of the tokens solve (I + L) U = rate * (V - decay * K S^T), where L is
    the strictly lower part of rate * (K K^T) * decay between the two tokens.
    """

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.to(getattr(torch, kind)).float() @ y.to(getattr(torch, kind)).float()

    def formula(wide: Wide) -> Tensors:
        heads, size = wide["v"].shape[1:]
        tokens = {name: wide[name].transpose(0, 1) for name in "qkv"}  # [heads, tokens, ...]
        tokens = {name: value.repeat_interleave(heads // len(value), 0) for name, value in tokens.items()}
        tokens["logs"] = (-wide["A_log"].exp() * softplus(wide["a"] + wide["dt_bias"])).T[..., None]
        tokens["rate"] = sigmoid(wide["b"]).T[..., None]
        bounds, given, key_size = wide["cu_seqlens"].tolist(), wide.maybe("state"), tokens["k"].shape[-1]
        after = torch.zeros((len(bounds) - 1, heads, size, key_size)) if given is None else given.clone()
        output = torch.zeros_like(tokens["v"])
        for row, (start, stop) in enumerate(pairwise(bounds)):
            for first in range(start, stop, CHUNK):
                part = slice(first, min(first + CHUNK, stop))
                q, k, v, logs, rate = (tokens[name][:, part] for name in ("q", "k", "v", "logs", "rate"))
                state, total = after[row], logs.cumsum(1)
                between = (
                    (total - total.mT).tril().exp().tril()
                )  # the upper part may overflow before it is cut off
                lower = (rate * between * product(k, k.mT)).tril(-1)
                identity = torch.eye(k.shape[1]).expand_as(lower)
                inverse = torch.linalg.solve_triangular(
                    identity + lower, identity, upper=False, unitriangular=True
                )
                known = product(product(inverse, rate * total.exp() * k), state.mT)
                corrections = product(inverse, rate * v) - known
                output[:, part] = total.exp() * product(q, state.mT) + product(
                    between * product(q, k.mT), corrections
                )
                last = total[:, -1:]
                after[row] = last.exp() * state + product(((last - total).exp() * corrections).mT, k)
        scale = wide.number("scale", 0.0) or key_size**-0.5
        return {"output": (output * scale).transpose(0, 1), "new_state": after}

    return formula


def by_instructions(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Products of queries [H, N, D] and keys [H, D, L], eight at a time, each sum being cut off to float32."""
    total = torch.zeros((*queries.shape[:2], keys.shape[-1]), dtype=torch.float64, device=queries.device)
    for first in range(0, queries.shape[-1], 8):
        total.baddbmm_(queries[..., first : first + 8].double(), keys[:, first : first + 8].double())
        total.view(torch.int64).bitwise_and_(-1 << 29)
    return total.to(queries.dtype)


def in_tiles(size: Callable[[int], int]) -> Callable[[Operands, Precision], Tensors]:
    """Tiles of keys, their size by the longest sequence's, o = sum(o_i 2**lse_i) / sum(2**lse_i)."""

    def computed(operands: Operands, precision: Precision) -> Tensors:
        longest = max((len(span.rows) for span in operands.spans), default=0)
        tile = max(1, size(max(longest, 1)))
        merged: Tensors = {}
        for start in range(0, max(longest, 1), tile):
            spans = []
            for span in operands.spans:
                keys = slice(start, start + tile)
                bias = hiding(visible(span, span.start, span.stop)[None, :, keys])
                bias = bias if span.bias is None else bias + span.bias[..., keys]
                spans.append(Span(span.start, span.stop, span.rows[keys], causal=False, bias=bias))
            part = attend(replace(operands, spans=tuple(spans)), precision)
            if not merged:
                merged = part
                continue
            top = torch.maximum(merged["lse"], part["lse"])
            top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
            left, right = torch.exp2(merged["lse"] - top), torch.exp2(part["lse"] - top)
            total = left + right
            safe = torch.where(total == 0, torch.ones_like(total), total)
            output = merged["output"] * (left / safe)[..., None] + part["output"] * (right / safe)[..., None]
            merged = {"output": output, "lse": top + torch.log2(total)}
        return merged

    return computed


def cache_order(wide: Wide) -> Mapping[str, torch.Tensor]:
    """Each token's list of rows in ascending order."""
    return {"sparse_indices": wide.given("sparse_indices").sort(-1).values}


ATTENTION = (
    Variant("naive, weights rounded", lost=False),
    Variant("float32 throughout", lost=False, weights="float32"),
    # The smallest instructions of tensor cores for 16-bit numbers: they cut off most often.
    Variant("summed by tensor cores", applies=of_16_bits, lost=False, product=by_instructions),
    Variant("online softmax", lost=False, attended=in_tiles(lambda _: 64)),
    Variant("split KV, merged", lost=False, attended=in_tiles(lambda longest: -(-longest // 2))),
    Variant(
        "keys in the opposite order",
        applies=lambda wide: (
            "qo_indptr" not in wide and "window_left" not in wide and {"q", "k"} != {*wide.values} & {"q", "k"}
        ),
        lost=False,
        spans=each(lambda span: seeing(span, lambda at: at.flip(0))),
    ),
)
PRODUCTS = (
    PLAIN,
    Variant("split-K", times=split),
    Variant("blocks, in the opposite order", times=matmul_in_blocks),
)
kernel = partial(Variant, round_result=to_bf16)  # which keeps an expert's result in bfloat16
MIXTURES = (
    PLAIN,
    Variant("experts and K in the opposite order", backwards=True),
    Variant(
        "softmax over all experts first",
        applies=lambda wide: routing_of(wide.definition).method is Method.RENORMALISE,
        weigh={Method.RENORMALISE: lambda logits, ids, _: sum_one(torch.softmax(logits, -1).gather(-1, ids))},
    ),
    kernel("bfloat16 intermediates", round_gemm1=to_bf16, round_activated=to_bf16),
    # As kernels keep activations: fp8 with the scales that go with the form of the weights.
    kernel(
        "activations in fp8, scales per block",
        applies=stored(Scaling.FP8_BLOCK),
        round_gemm1=to_bf16,
        round_activated=requantise_fp8,
    ),
    kernel(
        "gemm1's result and activations in fp8",
        applies=stored(Scaling.FP8_BLOCK),
        round_gemm1=requantise_fp8,
        round_activated=requantise_fp8,
    ),
    kernel("activations in fp8, one scale", applies=stored(Scaling.FP8_TENSOR), round_activated=to_fp8),
    kernel("activations in mxfp8", applies=stored(Scaling.FP4), round_tokens=in_mxfp8, round_activated=in_mxfp8),
    kernel(
        "the activated product in mxfp8",
        applies=stored(Scaling.MXFP8, Scaling.MXFP4),
        round_gemm1=to_bf16,
        round_activated=in_mxfp8,
    ),
    kernel(
        "the activated product in nvfp4",
        applies=lambda wide: mixture_of(wide.definition).tokens is Scaling.NVFP4,
        round_activated=requantise_fp4,
    ),
    FLOAT64,
)
TABLED = (
    Variant("naive, weights rounded", lost=False),
    Variant("float32 throughout", lost=False, weights="float32"),
    Variant("online softmax", lost=False, attended=in_tiles(lambda _: 64)),
)
# Of op_types that are not named here: PLAIN and FLOAT64.
CODED = (
    Variant("a quotient"),
    Variant("times a reciprocal", over=lambda values, scale: values * (1 / scale)),
    Variant("in float64", precision="float64"),
)
VARIANTS: Mapping[str, tuple[Variant, ...]] = {
    **dict.fromkeys(("quantization", "quantize_fp4", "quantize_nvfp4_smooth", "activation_quantize"), CODED),
    "rmsnorm": (
        PLAIN,
        Variant("chunked, in the opposite order", applies=lambda wide: not of_codes(wide), norm=in_chunks),
        Variant("rounded before the weight", applies=is_bare_norm, formula=rounded_before_the_weight),
        Variant("times a reciprocal", applies=of_codes, over=CODED[1].changes["over"]),
    ),
    "layernorm": (PLAIN, FLOAT64, Variant("variance by squares", norm=by_squares)),
    "gated_residual_rmsnorm": (
        PLAIN,
        NORM_BY_PYTORCH,
        Variant("a reciprocal root", norm=by_reciprocal_root),
    ),
    "gated_residual_next_rmsnorm": (
        PLAIN,
        Variant("a reciprocal root", norm=by_reciprocal_root, next_norm=by_reciprocal_root),
    ),
    "rmsnorm_sigmoid_gate": (PLAIN, NORM_BY_PYTORCH),
    "causal_conv1d": (
        Variant("a grouped convolution", formula=convolved),
        Variant("the newest product first", formula=partial(convolved, backwards=True)),
    ),
    **dict.fromkeys(("gemm", "gemm_bf16", "bmm_bf16", "gemm_mxfp8", "bmm_mxfp8", "gemm_bf16_fp4"), PRODUCTS),
    "linear_nvfp4_svdquant": (PLAIN, FLOAT64, Variant("smoothed in bfloat16", kept=to_bf16)),
    "bmm_fp8": (*PRODUCTS, Variant("scaled after the product", after=True)),
    "gemm_fp8": (*PRODUCTS, Variant("scaled after each block", after=True)),  # as kernels do
    **{
        f"quantize_{kind}": (
            PLAIN,
            Variant("times a reciprocal", over=lambda blocks, scale: blocks * (1 / scale)),
            Variant("largest times a reciprocal", scale_of_peak=lambda peaks, most=most: peaks * (1 / most)),
        )
        for kind, most in (("fp8", FP8_MAX), ("int8", 127.0))
    },
    "page_append": (
        PLAIN,
        Variant("token by token", write=one_by_one),
        Variant("flat rows", write=flat),
    ),
    "cascade_merge": (
        PLAIN,
        Variant("one state after the other", merge=in_turn),
        Variant("softmax", merge=by_softmax),
    ),
    "moe": MIXTURES,
    "moe_routing": (
        PLAIN,
        FLOAT64,
        *(
            Variant(name, applies=of_softmax, score=score)
            for name, score in (
                ("by PyTorch", lambda logits: torch.softmax(logits, -1)),
                ("powers of two", lambda logits: torch.softmax(logits.double(), -1).float()),
            )
        ),
        # The same where weights sum to 1.
        Variant(
            "softmax over the chosen",
            applies=lambda wide: of_softmax(wide) and renormalised(wide),
            score=same,
            after=softmax,
        ),
    ),
    "sampling": (Variant("multinomial"), Variant("inverse transform", applies=is_drawn, by=inverse_transform)),
    "gdn": (
        PLAIN,
        FLOAT64,
        *(
            Variant(f"chunks of 64, operands in {kind}", applies=has("cu_seqlens"), formula=chunked(kind))
            for kind in ("float32", "bfloat16")
        ),
    ),
    **dict.fromkeys(("gqa_paged", "gqa_ragged", "mla_ragged"), ATTENTION),
    "mla_paged": (PLAIN, *of("q_nope query q", *ATTENTION)),
    **dict.fromkeys(("block_sparse", "msa_sparse", "single_prefill", "single_decode"), TABLED),
    **dict.fromkeys(("trtllm_paged", "trtllm_paged_dcp_spec", "cudnn_paged", "xqa"), TABLED),
    "dsa_paged": (
        PLAIN,
        *of("sparse_indices", *ATTENTION, Variant("rows in the order of the cache", inputs=cache_order)),
        *of(
            "block_table",
            Variant("indexer: one head after the other", scored=head_by_head),
            Variant("indexer: two-stage top-k, sorted by place", chosen=best_of_tiles),
            Variant("indexer: float64", precision="float64"),
        ),
    ),
}


def variants_of(op_type: str) -> tuple[Variant, ...]:
    """The equivalent ways of an op_type, the formula first."""
    return VARIANTS.get(op_type, (PLAIN, FLOAT64))
