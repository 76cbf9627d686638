"""Softmax attention over gathered rows: its formula, how it goes wrong, and data that make that show.

Every attention op is brought to one shape: queries [T, Hq, D], flattened keys [S, Hkv, D] and values
[S, Hkv, Dv], and one `Span` per sequence that says which queries see which rows. Absorbed latent attention is the
case Hkv = 1 with the values equal to the first part of the keys; sparse attention is one span per token.

Queries without a visible key, whether the sequence is empty or q_len > kv_len under the causal mask, give an
output of 0 and an LSE of -inf. That is this project's decision where published references differ (some give NaN);
it is what FlashInfer's kernels do, and the limit of a sum over nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from traceproof.dataset.definition import DType
from traceproof.lazy import torch
from traceproof.ops.adapter import dim
from traceproof.ops.base import Given, Tensors, Value, scalar, tensor
from traceproof.ops.compare import Close, Comparison
from traceproof.ops.formula import Mutant, Part, Wide, altered, has, same

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition

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


# What attention is computed from


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence."""

    start: int  # first query row of the sequence
    stop: int  # one past its last query row
    rows: torch.Tensor  # int64 [kv_len], the rows of the flattened keys and values, in the order of the sequence
    causal: bool  # the last query sees all rows, each query before it one row less; otherwise all see all
    window: int = -1  # rows that a query sees before its own place, the last query's being the last row; -1: all
    bias: torch.Tensor | None = None  # [1 or Hkv, queries or 1, kv_len], added to scaled logits; -inf hides a row


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
class KeyLayout:
    """Names of a form's tensors. Parts of a vector lie side by side."""

    queries: tuple[str, ...]  # each [T, Hq, D]
    keys: tuple[str, ...]  # as wide as the queries: [pages, page_size, Hkv, D], or [S, Hkv, D] without pages
    values: str  # likewise; where it is a part of the keys, there is one key head, and no axis for it

    @property
    def latent(self) -> bool:
        """Whether all heads share one key, of which a part is the value too."""
        return self.values in self.keys

    def flat(self, cache: torch.Tensor) -> torch.Tensor:
        """Keys or values as rows [S, Hkv, D]."""
        heads = 1 if self.latent else cache.shape[-2]
        return cache.reshape(-1, heads, cache.shape[-1])


LAYOUTS = (
    KeyLayout(("q",), ("k_cache",), "v_cache"),
    KeyLayout(("q",), ("k",), "v"),
    KeyLayout(("q_nope", "q_pe"), ("ckv_cache", "kpe_cache"), "ckv_cache"),
)


def layout_of(names: Container[str]) -> KeyLayout:
    """The layout of a form whose inputs have these names."""
    return next(layout for layout in LAYOUTS if layout.values in names)


def operands_of(inputs: Given) -> Operands:
    """The inputs of any form as one shape."""
    q, k, v, rows = flattened(inputs)
    cap = scalar(inputs, "logits_soft_cap") if inputs.get("logits_soft_cap") is not None else 0.0
    return Operands(q, k, v, _spans(inputs, rows), scalar(inputs, "sm_scale"), cap)


def spans_of(inputs: Given) -> Spans:
    """The sequences of any form."""
    return operands_of(inputs).spans


def _spans(inputs: Given, rows: Sequence[torch.Tensor]) -> Spans:
    """One query per sequence, which sees all; with a `qo_indptr` several, under a causal mask."""
    causal = "qo_indptr" in inputs
    bounds: list[int] = tensor(inputs, "qo_indptr").tolist() if causal else list(range(len(rows) + 1))
    window = int(scalar(inputs, "window_left")) if inputs.get("window_left") is not None else -1
    return tuple(Span(bounds[at], bounds[at + 1], own, causal, window) for at, own in enumerate(rows))


# Calls of ground truths are emitted with the functions that they use, so these two give no class of ours.


def flattened(inputs: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Queries [T, Hq, D], keys [S, Hkv, D], values [S, Hkv, Dv], and the rows of these that each sequence has.

    Latent attention has one key head: keys are the latent and the rotated part side by side, as SGLang caches
    them, values the latent part.
    """
    if "ckv_cache" in inputs:
        latent = tensor(inputs, "ckv_cache")
        keys = torch.cat([latent, inputs["kpe_cache"]], -1).flatten(0, 1)[:, None]
        queries = torch.cat([inputs["q_nope"], inputs["q_pe"]], -1)
        return queries, keys, keys[..., : latent.shape[-1]], rows_of(inputs, latent.shape[1])
    if "kv_indices" in inputs:
        keys, values = tensor(inputs, "k_cache"), tensor(inputs, "v_cache")
        return inputs["q"], keys.flatten(0, 1), values.flatten(0, 1), rows_of(inputs, keys.shape[1])
    return inputs["q"], inputs["k"], inputs["v"], rows_of(inputs, 1)


def rows_of(inputs: Given, page: int) -> list[torch.Tensor]:
    """Each sequence's rows, int64: end to end, through a page table, or as a token's list names them, -1 none."""
    if "sparse_indices" in inputs:
        return [row[row >= 0] for row in tensor(inputs, "sparse_indices").long()]
    bounds = tensor(inputs, "kv_indptr")
    if "kv_indices" not in inputs:
        return [torch.arange(start, end, device=bounds.device) for start, end in pairwise(bounds.tolist())]
    indices, last = tensor(inputs, "kv_indices").long(), inputs.get("kv_last_page_len")
    filled = [page] * len(bounds) if last is None else last.tolist()
    within, rows = torch.arange(page, device=indices.device), []
    for (start, end), tail in zip(pairwise(bounds.tolist()), filled, strict=False):
        own = (indices[start:end, None] * page + within).reshape(-1)
        rows.append(own[: max(0, len(own) - page + tail)])
    return rows


def unfit(definition: Definition) -> str | None:
    """What is unknown of a definition with such inputs, dtypes or numbers of heads; None: nothing."""
    for name, spec in definition.inputs.items():
        if spec.dtype.startswith("float") and spec.dtype not in {DType.FLOAT16, DType.FLOAT32}:
            return f"{name} is {spec.dtype}: this oracle knows no scaled storage"
    layout = layout_of(definition.inputs)
    heads = dim(definition, layout.queries[0], -2) or 0
    kv_heads = 1 if layout.latent else dim(definition, layout.keys[0], -2)
    if not kv_heads or heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} key heads"
    return None


# The formula


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
                wide = span.bias.shape[1] > 1
                bias = span.bias[:, first - span.start : last - span.start] if wide else span.bias
                bias = bias.to(compute).repeat_interleave(ratio if wide else 1, 1)
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


def attention(  # noqa: PLR0913 - one keyword per way of being wrong
    wide: Wide,
    *,
    read: Callable[[Given], Operands] = operands_of,
    sinks: bool = True,
    capped: bool = True,
    spans: Callable[[Spans], Spans] = lambda spans: spans,
    scale: Callable[[float], float] = lambda scale: scale,
    interleaved: bool = False,
    values: Part = same,
    shifted: bool = True,
    weights: str = "",
    lost: bool = True,
    instruction: int = 0,
    tile: Callable[[int], int] | None = None,
) -> Tensors:
    """softmax(q k^T * sm_scale) v, and the base-2 log-sum-exp of the logits; `read` brings inputs to that shape.

    A sink, if there are `sinks` [heads], is one more logit of a head, whose value is zero.

    In float32 as a naive kernel computes it: weights exp(logit - max) rounded to the inputs' dtype, since that is
    what a tensor core multiplies with the values. The row sum, and so the LSE, is taken over the rounded weights:
    FlashInfer's kernels for Ampere get it from the tensor core too. What tensor cores may cut off a logit of
    16-bit numbers is `lost`, over the factor that the LSE's gate allows.

    Of a variant: `weights` kept in that dtype, products added so many per `instruction`, keys in tiles, whose size
    `tile` says of the longest sequence. Of a mutant: other `spans`, another `scale`, query head h reading key head
    h % Hkv (`interleaved`), other `values`, logits that are not `shifted` by the largest one, nor `capped`;
    `sinks` left out.
    """
    given = read(wide.values)
    given = replace(given, spans=spans(given.spans), scale=scale(given.scale), v=values(given.v))
    given = given if capped else replace(given, cap=0.0)
    if interleaved:
        heads = torch.arange(given.q.shape[1], device=given.q.device) % given.k.shape[1]
        own = tuple(
            span if span.bias is None or len(span.bias) == 1 else replace(span, bias=span.bias[heads])
            for span in given.spans
        )
        given = replace(given, k=given.k[:, heads], v=given.v[:, heads], spans=own)
    precision = Precision(torch.float64, torch.float64)
    if wide.dtype is not torch.float64:
        cut = cut_off(given.q.shape[-1]) / LSE_FACTOR if lost and given.q.dtype.itemsize == 2 else 0.0
        kept = getattr(torch, weights) if weights else given.q.dtype
        precision = Precision(wide.dtype, kept, cut, instruction, shifted)
    if tile is None:
        found = attend(given, precision)
    else:
        longest = max((len(span.rows) for span in given.spans), default=1)
        found = in_tiles(given, precision, max(1, tile(longest)))
    if "sinks" in wide and sinks:
        sink = wide["sinks"].reshape(-1) / math.log(2.0)
        found["output"] *= (1 / (1 + torch.exp2(sink - found["lse"])))[..., None]
        found["lse"] = torch.logaddexp2(found["lse"], sink.expand_as(found["lse"]))
    return found


# Ways of computing it, right and wrong


def grouped(wide: Wide) -> bool:
    """Whether several query heads share each of several key heads."""
    layout = layout_of(wide.values)
    kv_heads = layout.flat(wide.given(layout.keys[0])).shape[1]
    return kv_heads not in {1, wide.given(layout.queries[0]).shape[1]}


def each(change: Callable[[Span], torch.Tensor]) -> Callable[[Spans], Spans]:
    """Every sequence with other rows."""
    return lambda spans: tuple(replace(span, rows=change(span)) for span in spans)


def longest(change: Part) -> Callable[[Spans], Spans]:
    """The longest sequence that is queried with other rows."""

    def changed(spans: Spans) -> Spans:
        lengths = [len(span.rows) if span.stop > span.start else 0 for span in spans]
        at = max(range(len(lengths)), key=lengths.__getitem__, default=-1)
        return tuple(
            replace(span, rows=change(span.rows)) if index == at else span for index, span in enumerate(spans)
        )

    return changed


def misread(
    name: str,
    *,
    inputs: Callable[[Wide], Mapping[str, Value]] = lambda _: {},
    spans: Callable[[Spans], Spans] = lambda spans: spans,
) -> Mutant:
    """A mutant whose queries see other keys. Where they see the same ones, in some order, it says nothing."""

    def differ(one: Span, other: Span) -> bool:
        if one.window != other.window and one.stop > one.start:
            last = len(one.rows) - 1
            return min(max(one.window, 0), last) != min(max(other.window, 0), last)
        several = one.stop - one.start > 1
        if one.stop <= one.start or (one.causal and several) != (other.causal and several):
            return one.stop > one.start
        rows = (one.rows, other.rows)
        if not (one.causal and several):
            rows = (one.rows.sort().values, other.rows.sort().values)
        return not torch.equal(*rows)

    def applies(wide: Wide) -> bool:
        before, after = spans_of(wide.values), spans(spans_of(wide.changed(**inputs(wide)).values))
        return any(map(differ, before, after))

    return Mutant(name, applies=applies, inputs=inputs, spans=spans)


def reordered(order: Callable[[list[int]], list[int]]) -> Callable[[Wide], Mapping[str, Value]]:
    """The page table's entries in the order that `order` makes of its indptr."""

    def inputs(wide: Wide) -> Mapping[str, Value]:
        if "kv_indices" not in wide:
            return {}
        places = torch.tensor(order(wide["kv_indptr"].tolist()), dtype=torch.int64)
        return {"kv_indices": wide["kv_indices"][places]}

    return inputs


def transposed_table(bounds: list[int]) -> list[int]:
    """A table [batch, pages] read as [pages, batch]: entries go to the sequences in turn."""
    turns = [(page, row) for row, (start, stop) in enumerate(pairwise(bounds)) for page in range(stop - start)]
    place = {turn: index for index, turn in enumerate(sorted(turns))}
    return [place[turn] for turn in turns]


def last_pages(filled: Callable[[Wide], int]) -> Callable[[Wide], Mapping[str, Value]]:
    """All last pages said to hold so many tokens."""

    def inputs(wide: Wide) -> Mapping[str, Value]:
        last = wide.maybe("kv_last_page_len")
        return {} if last is None else {"kv_last_page_len": torch.full_like(last, filled(wide))}

    return inputs


def has_lse(wide: Wide) -> bool:
    """Whether the log-sum-exp is asked for."""
    return "lse" in wide.definition.outputs


def wider(wide: Wide, more: int) -> Mapping[str, Value]:
    """The window so many keys longer, where there is one."""
    return {"window_left": max(0, int(wide.number("window_left")) + more)} if "window_left" in wide else {}


MUTANTS = (
    Mutant("uniform softmax", scale=lambda _: 0.0),
    Mutant("softmax scale dropped", scale=lambda _: 1.0),
    Mutant("softmax scale x 1.02", scale=lambda scale: scale * 1.02),
    misread(
        "one token dropped",
        spans=longest(lambda rows: torch.cat([rows[: len(rows) // 2], rows[len(rows) // 2 + 1 :]])),
    ),
    misread(
        "one token twice",
        spans=longest(lambda rows: torch.cat([rows[: len(rows) // 2 + 1], rows[len(rows) // 2 :]])),
    ),
    misread("first token dropped", spans=longest(lambda rows: rows[1:])),
    misread("last token dropped", spans=longest(lambda rows: rows[:-1])),
    # A causal query does not see its own key: the last key goes, and every query sees one less.
    misread("causal mask off by one", spans=each(lambda span: span.rows[:-1] if span.causal else span.rows)),
    misread("no causal mask", spans=lambda spans: tuple(replace(span, causal=False) for span in spans)),
    # The causal mask aligned to the start of the keys instead of their end.
    misread(
        "causal mask from the top left",
        spans=each(lambda span: span.rows[: span.stop - span.start] if span.causal else span.rows),
    ),
    # Rows are read from the cache's start.
    misread("page table ignored", spans=each(lambda span: torch.arange(len(span.rows), device=span.rows.device))),
    misread("page table transposed", inputs=reordered(transposed_table)),
    misread(
        "pages in the opposite order",
        inputs=reordered(
            lambda bounds: [at for start, stop in pairwise(bounds) for at in reversed(range(start, stop))]
        ),
    ),
    Mutant("wrong head map", applies=grouped, interleaved=True),
    misread("last page ignored", inputs=last_pages(lambda _: 0)),
    misread(
        "last page read whole",
        inputs=last_pages(lambda wide: wide.given(layout_of(wide.values).keys[0]).shape[1]),
    ),
    Mutant("values of the next head", applies=grouped, values=lambda values: values.roll(1, 1)),
    Mutant("no maximum subtracted", shifted=False),
    Mutant("soft cap dropped", applies=has("logits_soft_cap"), capped=False),
    Mutant("sinks dropped", applies=has("sinks"), sinks=False),
    misread("window one longer", inputs=lambda wide: wider(wide, 1)),
    misread("window one shorter", inputs=lambda wide: wider(wide, -1)),
    misread("window dropped", inputs=lambda wide: wider(wide, 1 << 20)),
    Mutant("sums in bfloat16", precision="bfloat16"),
    Mutant("weights in fp8", weights="float8_e4m3fn"),
    Mutant(
        "LSE rounded to bfloat16",
        applies=has_lse,
        outputs=lambda _, found: {"lse": found["lse"].to(torch.bfloat16)},
    ),
    Mutant("natural-log LSE", applies=has_lse, outputs=lambda _, found: {"lse": found["lse"] * math.log(2.0)}),
    Mutant(
        "LSE without the maximum",
        applies=has_lse,
        outputs=lambda _, found: {"lse": found["lse"] - found["lse"].floor()},
    ),
    altered("rotary part of the query ignored", "q_pe", change=lambda q: q * 0),
)
