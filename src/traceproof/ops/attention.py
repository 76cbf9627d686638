"""Softmax attention over gathered rows: its formula.

Every attention op is brought to one shape (`attention_calls`): queries [T, Hq, D], flattened keys [S, Hkv, D] and
values [S, Hkv, Dv], and one `Span` per sequence that says which queries see which rows. Absorbed latent attention
is the case Hkv = 1 with the values equal to the first part of the keys; sparse attention is one span per token.

Queries without a visible key, whether the sequence is empty or q_len > kv_len under the causal mask, give an
output of 0 and an LSE of -inf. That is this project's decision where published references differ (some give NaN);
it is what FlashInfer's kernels do, and the limit of a sum over nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from traceproof.lazy import torch
from traceproof.ops.base import Tensors
from traceproof.ops.compare import Close, Comparison

MAX_LOGITS = 1 << 22  # logits held at once: 32 MiB in float64, three such arrays live at a time
INSTRUCTION = 16  # products of 16-bit numbers that a tensor core of a Hopper GPU adds to a float32 sum at a time
FLOAT32_BITS = -1 << 29  # of a float64: what is left once it is cut off to float32
LSE_FACTOR = 8.0  # of the gate of log-sum-exps
GATES: Mapping[str, Comparison] = {
    "output": Close(),
    # Over a single key the LSE is one dot product: few values a case, some exact by luck. The worst of 192 right
    # answers (3 to 6 heads, one key) came to 1.07 of the limit at factor 4 and to 0.72 at 8.
    "lse": Close(factor=LSE_FACTOR, reason="few roundings to measure by, and a CPU's luck differs from a GPU's"),
}


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence."""

    start: int  # first query row of the sequence
    stop: int  # one past its last query row
    rows: torch.Tensor  # int64 [kv_len], the rows of the flattened keys and values, in the order of the sequence
    causal: bool  # the last query sees all rows, each query before it one row less; otherwise all see all
    window: int = -1  # rows that a query sees before its own place, the last query's being the last row; -1: all
    bias: torch.Tensor | None = None  # [1, Hkv or Hq, queries or 1, kv_len], added to scaled logits; -inf hides


Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Operands:
    """What attention is computed from: q [T, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv], spans, the softmax scale.

    A soft cap bends scaled logits to `cap * tanh(logit / cap)`; 0: none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spans: Spans
    scale: float
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Precision:
    """How to compute: products and sums in `compute`, unnormalised softmax weights rounded to `weights`."""

    compute: torch.dtype
    weights: torch.dtype
    lost: float = 0.0  # part of each logit that is lost, toward zero
    instruction: int = 0  # products that are added at a time, each sum being cut off to float32; 0: as torch adds
    shifted: bool = True  # whether the largest logit is subtracted before the exponential


def attend(operands: Operands, precision: Precision) -> Tensors:
    """`output` [T, Hq, Dv] and base-2 `lse` [T, Hq], both in `precision.compute`, on the operands' device.

    Queries outside every span get an output of 0 and an LSE of -inf.
    """
    q, v, compute = operands.q, operands.v, precision.compute
    heads, kv_heads = q.shape[1], v.shape[1]
    ratio = heads // kv_heads
    output = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=compute, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=compute, device=q.device)
    for span in operands.spans:
        length = len(span.rows)
        if length == 0 or span.stop <= span.start:
            continue
        keys = operands.k[span.rows].to(compute).permute(1, 2, 0)  # [Hkv, D, L]
        values = v[span.rows].to(compute).transpose(0, 1)  # [Hkv, L, Dv]
        step = max(1, MAX_LOGITS // (heads * length))
        for first in range(span.start, span.stop, step):
            last = min(first + step, span.stop)
            queries = q[first:last].to(compute).view(last - first, kv_heads, ratio, -1).transpose(0, 1)
            logits = _products(queries.flatten(1, 2), keys, precision) * operands.scale  # [Hkv, n * ratio, L]
            if precision.lost:
                logits.sub_(logits, alpha=precision.lost)
            if operands.cap:
                logits = operands.cap * torch.tanh(logits / operands.cap)
            if span.bias is not None:
                bias = (
                    span.bias[:, first - span.start : last - span.start] if span.bias.shape[1] > 1 else span.bias
                )
                bias = _by_key_head(bias.to(compute), kv_heads, ratio)
                logits = (logits + bias).masked_fill_(torch.isneginf(bias), -math.inf)
            if (span.causal and first + 1 < span.stop) or span.window >= 0:  # the last query sees all keys
                places = torch.arange(first, last, device=q.device) + length - span.stop
                place, key = places.repeat_interleave(ratio)[:, None], torch.arange(length, device=q.device)
                if span.causal:
                    logits.masked_fill_(key > place, -math.inf)
                if span.window >= 0:
                    logits.masked_fill_(key < place - span.window, -math.inf)
            top = logits.amax(-1, keepdim=True)
            top = torch.where(top == -math.inf, torch.zeros_like(top), top) * precision.shifted
            weights = torch.exp(logits - top).to(precision.weights).to(compute)
            total = weights.sum(-1, keepdim=True)
            mixed = torch.bmm(weights, values) / torch.where(total == 0, torch.ones_like(total), total)
            sums = ((top + torch.log(total)) / math.log(2.0)).view(kv_heads, last - first, ratio)
            output[first:last] = mixed.view(kv_heads, last - first, ratio, -1).transpose(0, 1).flatten(1, 2)
            lse[first:last] = sums.transpose(0, 1).flatten(1, 2)
    return {"output": output, "lse": lse}


def _by_key_head(bias: torch.Tensor, kv_heads: int, ratio: int) -> torch.Tensor:
    """What is added to logits [Hkv, queries * ratio, keys], where one for all of them is 1 long."""
    if len(bias) in {1, kv_heads}:
        return bias.repeat_interleave(ratio if bias.shape[1] > 1 else 1, 1)
    return bias.view(kv_heads, ratio, *bias.shape[1:]).transpose(1, 2).flatten(1, 2)


def _products(queries: torch.Tensor, keys: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Products of queries [H, N, D] and keys [H, D, L], summed as `precision` says."""
    step, shape = precision.instruction, (*queries.shape[:2], keys.shape[-1])
    if not step:
        return torch.bmm(queries, keys)
    total = torch.zeros(shape, dtype=torch.float64, device=queries.device)
    queries, keys = queries.double(), keys.double()
    for first in range(0, queries.shape[-1], step):
        total.baddbmm_(queries[..., first : first + step], keys[:, first : first + step])
        total.view(torch.int64).bitwise_and_(FLOAT32_BITS)
    return total.to(precision.compute)


def in_tiles(operands: Operands, precision: Precision, tile: int) -> Tensors:
    """Tiles of so many keys, merged by their log-sum-exps: o = sum(o_i 2**lse_i) / sum(2**lse_i)."""
    longest = max((len(span.rows) for span in operands.spans), default=0)
    merged: Tensors = {}
    for start in range(0, max(longest, 1), tile):
        spans: list[Span] = []  # of the keys of this tile that a query sees, per query where they are not all
        for span in operands.spans:
            first = len(span.rows) - span.stop + span.start  # the place of the first query
            if span.window < 0 and (not span.causal or start + tile <= first + 1):  # all see it whole
                bias = None if span.bias is None else span.bias[..., start : start + tile]
                rows = span.rows[start : start + tile]
                spans.append(Span(span.start, span.stop, rows, causal=False, bias=bias))
                continue
            for query in range(span.start, span.stop):
                place = len(span.rows) - span.stop + query
                low = max(start, place - span.window) if span.window >= 0 else start
                high = max(low, min(start + tile, place + 1 if span.causal else len(span.rows)))
                bias = span.bias
                if bias is not None:
                    own = query - span.start if bias.shape[1] > 1 else 0
                    bias = bias[:, own : own + 1, low:high]
                spans.append(Span(query, query + 1, span.rows[low:high], causal=False, bias=bias))
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


def cut_off(width: int) -> float:
    """Relative loss that tensor cores may inflict on a sum of `width` products.

    An instruction adds INSTRUCTION products to the sum and cuts the result off to float32, toward zero: less than
    one spacing is lost, which is 2^-23 of the sum at most. Where n instructions let the sum grow evenly to s, that
    is (n + 1) / 2 times 2^-23 of s. The products are cut off too, 25 bits below the largest; cutting a sum off
    loses half a spacing on average, which leaves room for that.
    """
    return (math.ceil(width / INSTRUCTION) + 1) / 2 * 2.0**-23
