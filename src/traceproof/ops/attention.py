"""Softmax attention: its formula, and how the inputs of each kind of call are read, by their names.

Every call is brought to one shape: queries [T, Hq, D], flattened keys [S, Hkv, D] and values [S, Hkv, Dv], and one
`Span` per sequence that says which queries see which rows. Absorbed latent attention is the case Hkv = 1 with the
values equal to the first part of the keys; sparse attention is one span per token.

Queries without a visible key, whether the sequence is empty or q_len > kv_len under the causal mask, give an
output of 0 and an LSE of -inf. That is this project's decision where published references differ (some give NaN);
it is what FlashInfer's kernels do, and the limit of a sum over nothing.

Keys are in pages that an index pointer or a table [sequences, pages] names, or end to end, or where a token's list
points. Queries have offsets, lengths, or the same number in each sequence. In block-sparse calls, lists or bits
name the blocks of keys that a block of queries sees; each other block is left out, or replaced by a summary: one
key and one value, which weigh as much as all keys of the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from traceproof.dataset.definition import Definition, DType
from traceproof.lazy import torch
from traceproof.ops import registry
from traceproof.ops.adapter import dim
from traceproof.ops.base import Given, Tensors, taken, tensor
from traceproof.ops.compare import Close, Comparison
from traceproof.ops.formula import Part, Wide, same

MAX_LOGITS = 1 << 22  # logits held at once: 32 MiB in float64, three such arrays live at a time
TOGETHER = 1 << 20  # numbers in the keys, and in the logits, of sequences that are computed together
INSTRUCTION = 16  # products of 16-bit numbers that a tensor core of a Hopper GPU adds to a float32 sum at a time
LSE_FACTOR = 8.0  # factor of the comparison of log-sum-exps
GATES: Mapping[str, Comparison] = {
    "output": Close(),
    # Over a single key the LSE is one dot product: few values per case, some exact by chance. The worst of 192
    # correct results (3 to 6 heads, one key) reached 1.07 of the limit at factor 4 and 0.72 at 8.
    "lse": Close(factor=LSE_FACTOR, reason="few roundings to measure by, and a CPU's luck differs from a GPU's"),
}


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence: its queries, its keys, and which of them each query sees."""

    start: int  # first query row of the sequence
    stop: int  # one past its last query row
    rows: torch.Tensor  # int64 [kv_len], the rows of the flattened keys and values, in the order of the sequence
    causal: bool  # the last query sees all rows, each query before it one fewer; otherwise all see all
    window: int = -1  # rows that a query sees before its place, which for the last query is the last row; -1: all
    bias: torch.Tensor | None = None  # [1, Hkv or Hq; queries or 1; kv_len], added to scaled logits; -inf hides


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
    shifted: bool = True  # whether the largest logit is subtracted before the exponential
    # product of queries [H, N, D] and keys [H, D, L]; None: torch.bmm
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def attend(operands: Operands, precision: Precision) -> Tensors:
    """`output` [T, Hq, Dv] and base-2 `lse` [T, Hq], both in `precision.compute`, on the operands' device.

    Queries outside every span get an output of 0 and an LSE of -inf.
    """
    q, v, compute, product = operands.q, operands.v, precision.compute, precision.product or torch.bmm
    heads, kv_heads = q.shape[1], v.shape[1]
    ratio = heads // kv_heads
    output = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=compute, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=compute, device=q.device)
    for spans in alike(operands):
        span, size = spans[0], spans[0].stop - spans[0].start
        rows = torch.cat([one.rows for one in spans])  # [B * L]
        chosen = (taken(x, 0, rows).view(len(spans), -1, *x.shape[1:]) for x in (operands.k, v))
        keys, values = (x.transpose(1, 2).flatten(0, 1).to(compute) for x in chosen)  # [B * Hkv, L, D]
        starts = torch.tensor([[one.start] for one in spans], device=q.device)
        biases = [one.bias for one in spans if one.bias is not None]
        step = max(1, MAX_LOGITS // (heads * len(rows)))
        for first in range(0, size, step):
            last = min(first + step, size)
            queries = torch.stack([q[one.start + first : one.start + last] for one in spans]).to(compute)
            queries = queries.view(len(spans), last - first, kv_heads, ratio, -1).transpose(1, 2)
            queries = queries.flatten(2, 3).flatten(0, 1)  # [B * Hkv, n * ratio, D]
            logits = product(queries, keys.mT) * operands.scale
            if precision.lost:
                logits.sub_(logits, alpha=precision.lost)
            if operands.cap:
                logits = operands.cap * torch.tanh(logits / operands.cap)
            if biases:
                of_queries = slice(first, last) if biases[0].shape[1] > 1 else slice(None)
                shaped = (_by_key_head(bias[:, of_queries], kv_heads, ratio) for bias in biases)
                bias = torch.cat([one.expand(kv_heads, -1, -1) for one in shaped]).to(compute)
                logits = (logits + bias).masked_fill_(torch.isneginf(bias), -math.inf)
            if (span.causal and first + 1 < size) or span.window >= 0:  # the last query sees all keys
                hidden = ~visible(span, span.start + first, span.start + last)
                logits.masked_fill_(hidden.repeat_interleave(ratio, 0), -math.inf)
            top = logits.amax(-1, keepdim=True)
            top = torch.where(top == -math.inf, torch.zeros_like(top), top) * precision.shifted  # 0 if no key
            weights = torch.exp(logits - top).to(precision.weights).to(compute)
            total = weights.sum(-1, keepdim=True)
            mixed = torch.bmm(weights, values) / torch.where(total == 0, torch.ones_like(total), total)
            sums = (top + torch.log(total)) / math.log(2.0)
            places = starts + torch.arange(first, last, device=q.device)
            parts = len(spans), kv_heads, last - first, ratio
            output[places] = mixed.view(*parts, -1).transpose(1, 2).flatten(2, 3)
            lse[places] = sums.view(parts).transpose(1, 2).flatten(2)
    return {"output": output, "lse": lse}


def alike(operands: Operands) -> Iterator[list[Span]]:
    """Spans with keys and queries, those together that have the same sizes and masks."""
    groups: dict[Any, list[Span]] = {}
    for span in operands.spans:
        if len(span.rows) and span.stop > span.start:
            shape = None if span.bias is None else span.bias.shape
            sizes = len(span.rows), span.stop - span.start, span.causal, span.window, shape
            groups.setdefault(sizes, []).append(span)
    for (length, queries, *_), spans in groups.items():
        numbers = length * max(math.prod(operands.k.shape[1:]), operands.q.shape[1] * queries)  # of one
        most = max(1, TOGETHER // numbers)
        for first in range(0, len(spans), most):
            yield spans[first : first + most]


def visible(span: Span, first: int, last: int) -> torch.Tensor:
    """Bool [queries, keys]: which keys the causal mask and the window show to queries `first` to `last` - 1."""
    key = torch.arange(len(span.rows), device=span.rows.device)
    place = torch.arange(first, last, device=key.device)[:, None] + len(key) - span.stop
    seen = key >= (place - span.window if span.window >= 0 else torch.zeros_like(place))
    return seen & (key <= place) if span.causal else seen


def _by_key_head(bias: torch.Tensor, kv_heads: int, ratio: int) -> torch.Tensor:
    """Reshape a bias [1, Hkv or Hq; queries or 1; L] so that it adds to logits [Hkv, queries * ratio, L]."""
    if len(bias) in {1, kv_heads}:
        return bias.repeat_interleave(ratio if bias.shape[1] > 1 else 1, 1)
    return bias.view(kv_heads, ratio, *bias.shape[1:]).transpose(1, 2).flatten(1, 2)


def cut_off(width: int) -> float:
    """Bound of the relative error of a sum of `width` products on tensor cores, which truncate.

    An instruction adds INSTRUCTION products to the sum and cuts the result off to float32, toward zero: less than
    one spacing is lost, which is 2^-23 of the sum at most. Where n instructions let the sum grow evenly to s, that
    is (n + 1) / 2 times 2^-23 of s. The products are cut off too, 25 bits below the largest; cutting a sum off
    loses half a spacing on average, which leaves room for that.
    """
    return (math.ceil(width / INSTRUCTION) + 1) / 2 * 2.0**-23


# Inputs of calls, by name

# Axes of each input, several where calls differ: b sequences, y queries of each, t queries of all, h heads; n keys
# of all, l of each, g their heads; p pages of s tokens, m pages of a sequence; i, j ends of sequences; a heads of
# a pattern, r its rows, f ends of rows, x entries of lists, u blocks, w and z words of bits, k tiles of keys; A, B
# scales of codes. Widths may be packed.
OUTPUTS = ("output", "output_out", "out_out")
AXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "query", "q_fp4"), ("t h d", "b y h d", "h d")),
    **dict.fromkeys(("k", "key", "k_fp4"), ("n g D", "b l g D")),
    **dict.fromkeys(("v", "value"), ("n g e", "b l g e")),
    **dict.fromkeys(("k_cache", "v_cache"), ("p g s e",)),
    **dict.fromkeys(("kv_cache", "paged_kv_cache"), ("p c g s e", "p c s e", "p s e")),
    **dict.fromkeys(("block_tables", "page_table"), ("b m", "g b m", "b y m")),
    **dict.fromkeys(("seq_lens", "seq_lens_kv", "actual_seq_lens_kv"), ("b", "g b", "b y")),
    **dict.fromkeys(("actual_seq_lens_q", "causal_seqlens_kv_global"), ("b",)),
    **dict.fromkeys(("qo_indptr", "cum_seq_lens_q", "cu_seqlens_q"), ("i",)),
    **dict.fromkeys(("cum_seq_lens_kv", "cu_seqlens_k"), ("j",)),
    **dict.fromkeys(("k_summary", "v_summary"), ("b u g d",)),
    "qkv": ("t c h d", "t h d"),
    "q_scale": ("A",),
    "k_scale": ("B",),
    "max_score": ("h k t",),
    "sinks": ("h",),
    "q2k_indices": ("g t q",),
    "block_indptr": ("b a f",),
    "block_indices": ("x",),
    "exact_block_bits": ("b a r w",),
    "kv_valid_bits": ("b z",),
    "custom_mask": ("t n",),
    "alibi_slopes": ("h",),
    **dict.fromkeys(OUTPUTS, ("t h o", "b y h o", "h o")),
    "lse": ("t h",),
}
QUERIES, VALUES = ("q", "query", "qkv", "q_fp4", "q_nope", "q_pe"), ("v", "value", "v_cache")
KEYS = ("k", "key", "k_cache", "k_fp4")
COMBINED, TABLES = ("kv_cache", "paged_kv_cache"), ("block_tables", "page_table")
KV_LENGTHS = ("seq_lens", "seq_lens_kv", "actual_seq_lens_kv")
ENDS, KV_ENDS = ("qo_indptr", "cum_seq_lens_q", "cu_seqlens_q"), ("cum_seq_lens_kv", "cu_seqlens_k")
FACTORS = ("bmm2_scale", "output_scale", "scale_bmm2")
SCALES = ("sm_scale", "scale", "softmax_scale", "bmm1_scale", "scale_bmm1", "scale_softmax")
CAUSAL = ("causal", "is_causal", "q_len_per_req")  # the last is of draft tokens, which have a causal mask
CODES = DType.FLOAT8_E4M3FN  # dtype of queries, keys and values of 8 bits; softmax weights are rounded to it then
HEADS_LAST = "page_table"  # XQA's table; in its pages, heads are behind tokens
ROPE = 64  # rotated channels of a latent key, where no axis says how many there are
POINTED = "kv_indices"  # the pages of all sequences, one after the other
BLOCKED = ("block_indptr", "exact_block_bits")
WORDS = frozenset({"exact_block_bits", "kv_valid_bits"})
MSA_BLOCK = 128  # keys of a block that MiniMax's lists name
# Values of scalar inputs in cases.
NUMBERS: Mapping[str, float] = {
    "q_block_size": 8,
    "kv_block_size": 16,
    "window_left": 20,  # ends in the last page or the one before it
    "logits_soft_cap": 8,  # bends: logits reach some ten
    **dict.fromkeys(("bmm2_scale", "output_scale", "scale_bmm2", "q_global_scale"), 0.75),
    "k_global_scale": 0.25,
    **dict.fromkeys(("causal", "is_causal", "enable_block_sparse_attention", "return_lse"), 1),
    "cp_world": 4,
    "cp_rank": 2,
}
# Inputs that do not change the result: memory to work in, sizes given once more, options left at their defaults.
UNSAID = """
workspace_buffer semaphores output validate split_kv out_dtype kv_layout mask_type enable_pdl max_kv_len
max_seq_len max_seq_len_q max_q_len max_sequence_kv max_token_per_sequence max_seq_len_kv num_kv_heads page_size
seq_len_q batch_size_scalar batch_size request_order share_pattern_across_kv_heads k_sf_cache v_sf_cache o_sf_scale
skip_all_rows_active_check skip_softmax_threshold_scale_factor return_lse enable_block_sparse_attention
semantic_page_size q_len_per_req seqlen_q kv_lora_rank qk_rope_head_dim qk_nope_head_dim return_lse_base
sparse_mla_top_k num_heads head_dim seq_len out scale_softmax scale_bmm1_d scale_bmm2_d
"""
SILENT = frozenset(UNSAID.split())


def one_of(names: Iterable[str], inputs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an input, or its specification
    """The first of some inputs that is given; None: none is."""
    return next((inputs[name] for name in names if inputs.get(name) is not None), None)


def is_tabled(definition: Definition) -> bool:
    """Whether tables, lengths or sizes say where keys are, as there is no kv_indptr and no sparse_indices."""
    return not {"kv_indptr", "sparse_indices"} & definition.inputs.keys()


def is_causal(definition: Definition, inputs: Given) -> bool:
    """Whether the last query of a sequence sees all keys, each before it one fewer; otherwise all see all."""
    stated: float | str | None = number(definition, inputs, *CAUSAL)
    if stated is None:
        stated = definition.constants.get("causal")
    if stated is None:
        usual: bool = getattr(registry.get(definition.op_type), "causal", False)
        return usual if is_tabled(definition) else "qo_indptr" in definition.inputs
    return bool(stated)


def words(bits: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits [..., w] as bools [..., 32 * w], the lowest bit first."""
    shifted = bits.view(torch.int32).long()[..., None] >> torch.arange(32, device=bits.device)
    return (shifted & 1).bool().flatten(-2)


def page_of(definition: Definition) -> int:
    """Tokens per page, or per entry of a table if entries name parts of pages; 1: there are no pages."""
    if not is_tabled(definition):
        paged = POINTED in definition.inputs
        return (dim(definition, layout_of(definition.inputs).keys[0], 1) if paged else 1) or 1
    cache = one_of((*COMBINED, "k_cache"), definition.inputs)
    axes = ("page_size",) if cache is None else ("page_size", *cache.shape[-2:-1])
    return next((definition.const_axes[axis] for axis in axes if axis in definition.const_axes), 1)


def has_tokens_first(definition: Definition) -> bool:
    """Whether pages of `k_cache` are [tokens, heads, channels], as far as an axis `page_size` tells it."""
    cache = definition.inputs.get("k_cache")
    return cache is None or "page_size" not in (cache.shape or ())[2:]


def blocks_of(definition: Definition) -> tuple[int, int]:
    """(queries, keys) per block, where patterns are of blocks."""
    sizes = {**NUMBERS, **definition.const_axes}
    return int(sizes["q_block_size"]), int(sizes["kv_block_size"])


def number(definition: Definition, inputs: Given, *names: str) -> float | None:
    """A number that is an input or a constant axis, by any of its names; None: neither."""
    value = one_of(names, inputs)
    return float(value) if value is not None else one_of(names, definition.const_axes)


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """Names of a form's tensors; several are the parts of one vector, side by side."""

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


# Calls of ground truths are emitted as code with the functions that they use: these two return no class of ours.


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
    """int64 rows of each sequence's keys: end to end, through pages, or as a token's list names them (-1: none).

    Without any of these there is one sequence, of all rows.
    """
    if "kv_indptr" not in inputs and "sparse_indices" not in inputs:
        return [torch.arange(len(inputs["k"]), device=inputs["k"].device)]
    if "sparse_indices" in inputs:
        lists = tensor(inputs, "sparse_indices").long()
        return [*torch.split(lists[lists >= 0], (lists >= 0).sum(-1).tolist())]
    bounds = tensor(inputs, "kv_indptr")
    if "kv_indices" not in inputs:
        return [torch.arange(start, end, device=bounds.device) for start, end in pairwise(bounds.tolist())]
    pages, last = tensor(inputs, "kv_indices"), inputs.get("kv_last_page_len")
    filled = [page] * len(bounds) if last is None else last.tolist()
    every = tokens_on(pages, page).view(-1, page)
    rows = []
    for (start, end), in_last_page in zip(pairwise(bounds.tolist()), filled, strict=False):
        tokens = every[start:end].flatten()
        rows.append(tokens[: max(0, len(tokens) - page + in_last_page)])
    return rows


def tokens_on(pages: torch.Tensor, page: int) -> torch.Tensor:
    """int64 rows of all tokens on these pages, of `page` tokens each, in order."""
    return (pages.long()[:, None] * page + torch.arange(page, device=pages.device)).flatten()


# Reading


def tensors_of(
    definition: Definition, inputs: Given
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """As `flattened`, of a call with tables or of equally long sequences; queries keep their shape."""
    q, keys, values = (one_of(names, inputs) for names in (QUERIES, KEYS, VALUES))
    cache, heads_last = one_of(COMBINED, inputs), HEADS_LAST in inputs
    if "qkv" in inputs:
        q, keys, values = q.unbind(1) if q.dim() == 4 else (q, q, q)
    if cache is not None and cache.dim() == 5:  # pages [kv, heads, tokens, channels]: heads are before tokens
        keys, values, heads_last = cache[:, 0], cache[:, 1], False
    elif cache is not None:  # latent: a value is the first part of its key
        keys = cache.reshape(-1, 1, 1, cache.shape[-1])
    values = keys if values is None else values
    length = keys.shape[1] if keys.dim() == 4 else len(keys)
    if one_of(TABLES, inputs) is not None and not heads_last:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    k, v = keys.reshape(-1, *keys.shape[-2:]), values.reshape(-1, *values.shape[-2:])
    return q, k, v[..., : value_width(definition)], tokens_of(definition, inputs, count=len(k), length=length)


def tokens_of(definition: Definition, inputs: Given, *, count: int, length: int) -> list[torch.Tensor]:
    """int64 rows of each sequence's keys, or each query's if a table has pages per query, out of `count` rows.

    If each key head has a table, there are rows per sequence and key head, of keys as `operands_of` has them then.
    Without a table, sequences are end to end, of `length` keys each if no input says where they end.
    """
    table, lengths, ends = (one_of(names, inputs) for names in (TABLES, KV_LENGTHS, KV_ENDS))
    device = one_of(QUERIES, inputs).device
    if table is None:
        bounds = range(0, count + 1, length) if ends is None else ends.tolist()
        return [torch.arange(start, stop, device=device) for start, stop in pairwise(bounds)]
    page = page_of(definition)
    if listed(definition):  # -1 names no page
        return [tokens_on(pages[pages >= 0], page) for pages in table.flatten(0, 1)]
    if by_heads(definition):
        heads, sequences, _ = table.shape
        pairs = product(range(sequences), range(heads))
        return [tokens_on(table[at, row], page)[: int(lengths[at, row])] * heads + at for row, at in pairs]
    counts = [int(inputs.get("max_sequence_kv") or 0)] * len(table)
    if lengths is not None:
        counts = lengths.view(torch.int32).reshape(len(lengths), -1)[:, 0].tolist()
    return [tokens_on(pages, page)[:count] for pages, count in zip(table, counts, strict=True)]


def operands_of(definition: Definition, inputs: Given) -> Operands:
    """The operands of any call. Summaries of blocks are appended to keys and values.

    If each key head has a table (`by_heads`), each pair of a sequence and a key head is a sequence here.
    """
    q, k, v, rows = tensors_of(definition, inputs) if is_tabled(definition) else flattened(inputs)
    scale, cap = one_of(SCALES, inputs), inputs.get("logits_soft_cap")
    if scale is None:  # XQA's latent form has one of 1
        scale = 1.0 if v.shape[-1] < k.shape[-1] and "v_cache" in inputs else q.shape[-1] ** -0.5
    queries = q.reshape(-1, *q.shape[-2:])
    if by_heads(definition):
        queries = q.reshape(-1, q.shape[1] // k.shape[1], q.shape[-1])
        k, v = (x.reshape(-1, 1, x.shape[-1]) for x in (k, v))
    spans = spans_of(definition, inputs, queries=len(queries), keys=len(k), rows=rows)
    if "k_summary" in inputs:
        k = torch.cat([k, inputs["k_summary"].reshape(-1, *k.shape[1:])])
        v = torch.cat([v, inputs["v_summary"].reshape(-1, *v.shape[1:])])
    return Operands(queries, k, v, tuple(spans), scale=float(scale), cap=float(cap or 0.0))


def spans_of(
    definition: Definition, inputs: Given, *, queries: int, keys: int, rows: list[torch.Tensor]
) -> list[Span]:
    """A Span per sequence with these rows of keys, and with biases by all inputs that hide or weigh keys."""
    lengths, bounds = inputs.get("actual_seq_lens_q"), one_of(ENDS, inputs)
    if lengths is not None:
        ends = [0, *lengths.cumsum(0).tolist()]
    elif bounds is not None:
        ends = bounds.tolist()
    else:  # equally many queries in each sequence
        count = queries // max(1, len(rows))
        ends = [at * count for at in range(len(rows) + 1)]
    causal, window = is_causal(definition, inputs), inputs.get("window_left")
    causal &= "causal_seqlens_kv_global" not in inputs  # its bias hides keys
    spans = []
    for sequence, ((start, stop), tokens) in enumerate(zip(pairwise(ends), rows, strict=True)):
        span = Span(start, stop, tokens, causal, -1 if window is None else int(window))
        span = replace(span, bias=bias_of(inputs, sequence, span))
        if one_of(BLOCKED, inputs) is not None:
            span = with_blocks(definition, inputs, sequence, span, keys)
        spans.append(span)
    return spans


def listed(definition: Definition) -> bool:
    """Whether a table, [sequences, queries, pages], names pages for each query."""
    table, q = one_of(TABLES, definition.inputs), one_of(QUERIES, definition.inputs)
    return table is not None and len(table.shape) == 3 and table.shape[0] == q.shape[0]


def by_heads(definition: Definition) -> bool:
    """Whether a table, [key heads, sequences, pages], names pages for each key head."""
    table = one_of(TABLES, definition.inputs)
    return table is not None and len(table.shape) == 3 and not listed(definition)


def value_width(definition: Definition) -> int:
    """Channels per head of the output; of a latent key without an axis for them, all but the ROPE rotated ones."""
    output, cache = one_of(OUTPUTS, definition.outputs), one_of(COMBINED, definition.inputs)
    width = None if output is None else definition.const_axes.get(output.shape[-1])
    if width is not None:
        return width
    if cache is not None:
        return definition.const_axes[cache.shape[-1]] - ROPE
    return definition.const_axes[one_of(QUERIES, definition.inputs).shape[-1]]  # the output has no value channels


def hiding(seen: torch.Tensor) -> torch.Tensor:
    """A float64 bias of the shape of `seen`: 0 where a key is seen, else minus infinity."""
    return torch.zeros(seen.shape, dtype=torch.float64, device=seen.device).masked_fill(~seen, -math.inf)


def bias_of(inputs: Given, sequence: int, span: Span) -> torch.Tensor | None:
    """Bias [1 or heads, queries, keys] by a rank's share, lists of blocks, a mask or ALiBi, or None."""
    if one_of(("causal_seqlens_kv_global", "q2k_indices", "custom_mask", "alibi_slopes"), inputs) is None:
        return None
    key = torch.arange(len(span.rows), device=span.rows.device)
    query = torch.arange(span.stop - span.start, device=key.device)[:, None]
    if "causal_seqlens_kv_global" in inputs:  # a rank has keys r, r + world, ..., up to each draft token's place
        place, rank = int(inputs["causal_seqlens_kv_global"][sequence]) + query, int(inputs["cp_rank"])
        count = (place - rank).div(int(inputs["cp_world"]), rounding_mode="floor") + 1
        return hiding((key < count)[None])
    if "q2k_indices" in inputs:  # [Hkv, T, topk]; -1 names none
        blocks = inputs["q2k_indices"][:, span.start : span.stop, :, None]
        return hiding((blocks == key // MSA_BLOCK).any(-2))
    mask, slopes = inputs.get("custom_mask"), inputs.get("alibi_slopes")
    bias = None if mask is None else hiding(mask)[None]
    if slopes is not None:  # the slope times (key's place - query's place)
        distance = key - (query + len(key) - len(query))
        slanted = slopes.double()[:, None, None] * distance
        bias = slanted if bias is None else bias + slanted
    return bias


def with_blocks(definition: Definition, inputs: Given, sequence: int, span: Span, keys: int) -> Span:
    """The Span under its pattern of blocks, with summaries of the hidden blocks, if given, as further keys.

    The summaries are rows after the `keys` rows of all sequences.
    """
    height, width = (int(number(definition, inputs, name) or 0) for name in ("q_block_size", "kv_block_size"))
    length, device = len(span.rows), span.rows.device
    count = -(-length // width)
    if inputs.get("block_indptr") is not None:
        ends, lists = inputs["block_indptr"][sequence].tolist(), inputs["block_indices"].long()
        shown = torch.zeros((len(ends), len(ends[0]) - 1, count), dtype=torch.bool, device=device)
        for head, ends_of_head in enumerate(ends):
            for at, (start, stop) in enumerate(pairwise(ends_of_head)):
                blocks = lists[start:stop]
                shown[head, at, blocks[blocks < count]] = True
    else:
        shown = words(inputs["exact_block_bits"][sequence])[..., :count]
    shown = shown.repeat_interleave(height, 1)[:, : span.stop - span.start]  # [heads, queries, blocks]
    seen = shown.repeat_interleave(width, 2)[..., :length]
    if inputs.get("kv_valid_bits") is not None:
        seen = seen & words(inputs["kv_valid_bits"][sequence])[:length]
    if "k_summary" not in inputs:
        return replace(span, bias=hiding(seen))
    # A summary weighs as much as all keys of its block: log(their number) is added to its logit.
    mass = torch.full((count,), float(width), dtype=torch.float64, device=device)
    mass[-1:] = length - (count - 1) * width
    bias = torch.cat([hiding(seen), hiding(~shown) + mass.log()], -1)
    summaries = torch.arange(count, device=device) + keys + sequence * count
    return replace(span, rows=torch.cat([span.rows, summaries]), bias=bias)


def attention(  # noqa: PLR0913 - one keyword per way of being wrong
    wide: Wide,
    *,
    sinks: bool = True,
    capped: bool = True,
    spans: Callable[[Spans], Spans] = lambda spans: spans,
    scale: Callable[[float], float] = lambda scale: scale,
    interleaved: bool = False,
    values: Part = same,
    shifted: bool = True,
    weights: str = "",
    lost: bool = True,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    attended: Callable[[Operands, Precision], Tensors] = attend,
    factor: bool = True,
) -> Tensors:
    """softmax(q k^T * sm_scale) v, and the base-2 log-sum-exp of the logits.

    A sink, if there are `sinks` [heads], is one more logit of a head, whose value is zero. Some calls multiply the
    output by a `factor`.

    In float32 as a naive kernel computes it: weights exp(logit - max) rounded to the inputs' dtype, since that is
    what a tensor core multiplies with the values. The row sum, and so the LSE, is taken over the rounded weights:
    FlashInfer's kernels for Ampere get it from the tensor core too. What tensor cores may cut off a logit of
    16-bit numbers is `lost`, over the factor that the LSE's gate allows.

    Equivalent variants keep softmax `weights` in that dtype, or take another `product` or another function than
    `attend` (`attended`). Mutants change `spans`, `scale` or `values`, let query head h read key head h % Hkv
    (`interleaved`), do not subtract the largest logit (`shifted`), or leave out the cap (`capped`), `sinks` or
    `factor`.
    """
    operands = operands_of(wide.definition, wide.values)
    operands = replace(operands, spans=spans(operands.spans), scale=scale(operands.scale), v=values(operands.v))
    if not capped:
        operands = replace(operands, cap=0.0)
    if interleaved:
        operands = with_interleaved_heads(operands)
    precision = Precision(torch.float64, torch.float64)
    if wide.dtype is not torch.float64:
        cut = cut_off(operands.q.shape[-1]) / LSE_FACTOR if lost and operands.q.dtype.itemsize == 2 else 0.0
        rounded_to = getattr(torch, weights) if weights else operands.q.dtype
        precision = Precision(wide.dtype, rounded_to, cut, shifted, product)
    results = attended(operands, precision)
    output, lse = results["output"], results["lse"]
    if "sinks" in wide and sinks:
        sink = wide["sinks"].reshape(-1) / math.log(2.0)
        output *= (1 / (1 + torch.exp2(sink - lse)))[..., None]
        lse = torch.logaddexp2(lse, sink.expand_as(lse))
    spec = one_of(OUTPUTS, wide.definition.outputs)
    if spec is not None:  # several queries of a sequence may be one axis more, and key heads are apart
        rows = one_of(QUERIES, wide.values).shape[: len(spec.shape) - 2]
        heads = wide.definition.const_axes.get(spec.shape[-2], output.shape[1])
        output = output.reshape((*rows, heads, output.shape[-1]))
    multiplier = one_of(FACTORS, wide.values)
    if factor and multiplier is not None:
        output = output * float(multiplier)
    return {**dict.fromkeys(OUTPUTS, output), "lse": lse}


def with_interleaved_heads(operands: Operands) -> Operands:
    """A mutant's operands: query head h reads key head h % Hkv, and its bias, where heads have several."""
    head = torch.arange(operands.q.shape[1], device=operands.q.device)
    spans = tuple(
        span if span.bias is None else replace(span, bias=span.bias[head % len(span.bias)])
        for span in operands.spans
    )
    heads = head % operands.k.shape[1]
    return replace(operands, k=operands.k[:, heads], v=operands.v[:, heads], spans=spans)
