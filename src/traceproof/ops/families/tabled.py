"""Attention as TensorRT-LLM's, cuDNN's, XQA's, PrimTS's and MiniMax's kernels are called: tables, lengths, blocks.

Keys lie in pages that a table [sequences, pages] names, or side by side; queries have lengths, or the same number
in each sequence. Lists or bits of blocks of keys, per block of queries, leave out the others, or put a mean in the
place of each, which weighs as many keys as it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from traceproof.dataset.definition import Definition, DType, TensorSpec
from traceproof.draw import HostDraw
from traceproof.lazy import torch
from traceproof.ops.adapter import Api, Outputs, dim, dtype_of
from traceproof.ops.attention import GATES, Operands, Span, Spans, attention
from traceproof.ops.attention import MUTANTS as ATTENTION
from traceproof.ops.attention_inputs import NEGATIVE, POISON, PageTable, Visible, drawn, starts, tiny
from traceproof.ops.base import Given, Tensors, Unsupported, Values, ordered, scalar, tensor
from traceproof.ops.cases import OTHER_SCALARS, Case
from traceproof.ops.compare import Close, Comparison
from traceproof.ops.formats import E2M1, E4M3, FP4_BLOCK, swizzled_size, unpack, unswizzle
from traceproof.ops.formula import Form, Mutant, Wide, altered, has
from traceproof.ops.lossless import NEVER, full
from traceproof.ops.op import Op

if TYPE_CHECKING:
    from traceproof.draw import Draw

# Axes of each input, several where calls differ: b sequences, y queries of each, t queries of all, h heads; n keys
# of all, l of each, g their heads; p pages of s tokens, m pages of a sequence; i, j ends of sequences; a heads of
# a pattern, r its rows, f ends of rows, x entries of lists, u blocks, w and z words of bits, k tiles of keys; A, B
# scales of codes. Widths may be packed.
AXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "query", "q_fp4"), ("t h d", "b y h d")),
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
    "q2k_indices": ("g t x",),
    "block_indptr": ("b a f",),
    "block_indices": ("x",),
    "exact_block_bits": ("b a r w",),
    "kv_valid_bits": ("b z",),
    **dict.fromkeys(("output", "output_out", "out_out"), ("t h o", "b y h o")),
    "lse": ("t h",),
}
QUERIES, VALUES = ("q", "query", "qkv", "q_fp4"), ("v", "value", "v_cache")
KEYS = ("k", "key", "k_cache", "k_fp4")
COMBINED, TABLES = ("kv_cache", "paged_kv_cache"), ("block_tables", "page_table")
KV_LENGTHS = ("seq_lens", "seq_lens_kv", "actual_seq_lens_kv")
ENDS, KV_ENDS = ("qo_indptr", "cum_seq_lens_q", "cu_seqlens_q"), ("cum_seq_lens_kv", "cu_seqlens_k")
FACTORS = ("bmm2_scale", "output_scale", "scale_bmm2")
SCALES = ("sm_scale", "scale", "softmax_scale", "bmm1_scale", "scale_bmm1", "scale_softmax")
CAUSAL = ("causal", "is_causal", "q_len_per_req")  # draft tokens have a causal mask
CODES = (
    DType.FLOAT8_E4M3FN
)  # of queries, keys and values that are numbers of 8 bits; weights are rounded to it then
# Right ways with tiles of 64 keys reach 2.4 times the baseline, which has one maximum.
IN_FP8 = Close(
    3.0, reason="weights in fp8 are rounded beside the maximum of a tile, the baseline's beside that of all"
)
ROPE = 64  # rotated channels of a latent key, where no axis says how many there are
BLOCKED = ("block_indptr", "exact_block_bits")
MSA_BLOCK = 128  # keys of a block that MiniMax's lists name
# Of block-sparse cases; windows; the factor of outputs; speculated tokens; context parallelism.
NUMBERS: Mapping[str, float] = {
    "q_block_size": 8,
    "kv_block_size": 16,
    "window_left": 20,
    "bmm2_scale": 0.75,
    "output_scale": 0.75,
    "scale_bmm2": 0.75,
    "causal": 1,
    "is_causal": 1,
    "cp_world": 4,
    "cp_rank": 2,
    "enable_block_sparse_attention": 1,
    "return_lse": 1,
    "q_global_scale": 0.75,
    "k_global_scale": 0.25,
}
# What of a call says nothing of the result: memory to work in, sizes once more, what is left at its default.
UNSAID = """
workspace_buffer semaphores output validate split_kv out_dtype kv_layout mask_type enable_pdl max_kv_len
max_seq_len max_seq_len_q max_q_len max_sequence_kv max_token_per_sequence max_seq_len_kv num_kv_heads page_size
seq_len_q batch_size_scalar batch_size request_order share_pattern_across_kv_heads k_sf_cache v_sf_cache o_sf_scale
skip_all_rows_active_check skip_softmax_threshold_scale_factor return_lse enable_block_sparse_attention
semantic_page_size q_len_per_req seqlen_q kv_lora_rank qk_rope_head_dim qk_nope_head_dim return_lse_base
sparse_mla_top_k num_heads head_dim seq_len out scale_softmax scale_bmm1_d scale_bmm2_d
"""
SILENT = frozenset(UNSAID.split())
LENGTHS: Mapping[str, tuple[int, int]] = {"small": (2, 40), "medium": (64, 257), "large": (256, 700)}
PATTERNS = ("negative", "outlier", "ties")
SELF_LONGEST = 150  # tokens of a case in which all of them are queries


def one_of(names: Iterable[str], inputs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an input, or its specification
    """The first of some inputs that is given; None: none is."""
    return next((inputs[name] for name in names if inputs.get(name) is not None), None)


def words(bits: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits [..., w] as bools [..., 32 * w], the lowest bit first."""
    whole = bits.view(torch.int32).long()[..., None] >> torch.arange(32, device=bits.device)
    return (whole & 1).bool().flatten(-2)


def page_of(definition: Definition) -> int:
    """Tokens that an entry of a table stands for: a page, or the part of one that has that name."""
    spec = one_of((*COMBINED, "k_cache"), definition.inputs)
    shape = () if spec is None else spec.shape
    known = [definition.const_axes.get(axis) for axis in ("page_size", *shape[-2:-1])]
    return next((size for size in known if size), 1)


def number(definition: Definition, inputs: Given, *names: str) -> float | None:
    """A number that is an input or a constant axis, by any of its names; None: neither."""
    found = one_of(names, inputs)
    return float(found) if found is not None else one_of(names, definition.const_axes)


# Reading a call's inputs


def tensors_of(
    definition: Definition, inputs: Given, *, heads_last: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Queries as they are, keys and values as rows [S, Hkv, D], and how many of these a sequence may have."""
    q, keys, values = (one_of(names, inputs) for names in (QUERIES, KEYS, VALUES))
    both, paged = one_of(COMBINED, inputs), one_of(TABLES, inputs) is not None
    if "qkv" in inputs:
        q, keys, values = q.unbind(1) if q.dim() == 4 else (q, q, q)
    if both is not None and both.dim() == 5:  # heads lie before tokens
        keys, values, heads_last = both[:, 0], both[:, 1], False
    elif both is not None:  # latent: a value is the first part of its key
        keys = values = both.reshape(-1, 1, 1, both.shape[-1])
    values = keys if values is None else values
    k, v = (one.transpose(1, 2) if paged and not heads_last else one for one in (keys, values))
    each = keys.shape[1] if keys.dim() == 4 else len(keys)
    k, v = (one.reshape(-1, *one.shape[-2:]) for one in (k, v))
    return q, k, v[..., : value_width(definition)], each


def tokens_of(definition: Definition, inputs: Given, *, count: int, each: int) -> list[torch.Tensor]:
    """Rows of the keys of each sequence, out of `count`; where a table names pages of each query, of it."""
    table, lengths, ends = (one_of(names, inputs) for names in (TABLES, KV_LENGTHS, KV_ENDS))
    device = one_of(QUERIES, inputs).device
    if table is None:
        bounds = range(0, count + 1, each) if ends is None else ends.tolist()
        return [torch.arange(start, stop, device=device) for start, stop in pairwise(bounds)]
    page = page_of(definition)
    within = torch.arange(page, device=device)
    if listed(definition):  # -1 names no page
        return [(own[own >= 0].long()[:, None] * page + within).flatten() for own in table.flatten(0, 1)]
    known = [int(inputs.get("max_sequence_kv") or 0)] * len(table)
    if lengths is not None:
        known = lengths.view(torch.int32).reshape(len(lengths), -1)[:, 0].tolist()
    return [(own[:, None].long() * page + within).flatten()[:n] for own, n in zip(table, known, strict=True)]


def by_head(definition: Definition, inputs: Given, made: Mapping[str, Any]) -> Operands:
    """Tables of each key head: heads and sequences are alike."""
    table, lengths, page, q = one_of(TABLES, inputs), one_of(KV_LENGTHS, inputs), page_of(definition), made["q"]
    heads, within = table.shape[0], torch.arange(page, device=q.device)
    spans = []
    for row, head in product(range(table.shape[1]), range(heads)):
        own = (table[head, row, :, None].long() * page + within).flatten()[: int(lengths[head, row])]
        spans.append(Span(row * heads + head, row * heads + head + 1, own * heads + head, causal=False))
    apart = {name: made[name].reshape(-1, 1, made[name].shape[-1]) for name in "kv"}
    apart["q"] = q.reshape(-1, q.shape[1] // heads, q.shape[-1])
    return Operands(**{**made, **apart}, spans=tuple(spans))


def read(definition: Definition, inputs: Given, *, heads_last: bool = False, causal: bool = False) -> Operands:
    """What attention is computed from. Summaries of blocks are keys behind the others."""
    q, k, v, each = tensors_of(definition, inputs, heads_last=heads_last)
    scale, table = one_of(SCALES, inputs), one_of(TABLES, inputs)
    queries = q.reshape(-1, *q.shape[-2:])
    said, window = number(definition, inputs, *CAUSAL), inputs.get("window_left")
    causal = causal if said is None else bool(said)
    unscaled = v.shape[-1] < k.shape[-1] and "v_cache" in inputs  # XQA's latent form has a scale of 1
    usual = 1.0 if unscaled else q.shape[-1] ** -0.5
    made: dict[str, Any] = {"q": queries, "k": k, "v": v, "scale": usual if scale is None else float(scale)}
    if table is not None and table.dim() == 3 and not listed(definition):
        return by_head(definition, inputs, made)
    rows = tokens_of(definition, inputs, count=len(k), each=each)
    ends, own = one_of(ENDS, inputs), inputs.get("actual_seq_lens_q")
    asked = starts(own.tolist()) if own is not None else None if ends is None else ends.tolist()
    bounds = asked or [len(queries) // len(rows) * at for at in range(len(rows) + 1)]
    kept = -1 if window is None else int(window)
    spans = [Span(*pair, own, causal, kept) for pair, own in zip(pairwise(bounds), rows, strict=True)]
    if "causal_seqlens_kv_global" in inputs:
        spans = [replace(span, bias=owned(inputs, row, span), causal=False) for row, span in enumerate(spans)]
    if "q2k_indices" in inputs:
        spans = [replace(span, bias=named(inputs["q2k_indices"], span)) for span in spans]
    if one_of(BLOCKED, inputs) is not None:
        spans = [blocked(definition, inputs, row, span, len(k)) for row, span in enumerate(spans)]
        if "k_summary" in inputs:
            summaries = [inputs[name].reshape(-1, *k.shape[1:]) for name in ("k_summary", "v_summary")]
            made |= {"k": torch.cat([k, summaries[0]]), "v": torch.cat([v, summaries[1]])}
    return Operands(**made, spans=tuple(spans))


def listed(definition: Definition) -> bool:
    """Whether a table names pages of each query."""
    table, q = one_of(TABLES, definition.inputs), one_of(QUERIES, definition.inputs)
    return table is not None and len(table.shape) == 3 and table.shape[0] == q.shape[0]


def windowed(definition: Definition) -> bool:
    """Whether cases have a window: an optional one mostly wants a mask that is not the default."""
    window = definition.inputs.get("window_left")
    return window is not None and (not window.optional or "q_len_per_req" in definition.inputs)


def value_width(definition: Definition) -> int:
    """Channels of an output's head: of a latent key that no axis divides, all that are not rotated."""
    width = definition.const_axes.get((next(iter(definition.outputs.values())).shape or ("",))[-1])
    both = one_of(COMBINED, definition.inputs)
    if width is None and both is None:  # no output has values
        return definition.const_axes[one_of(QUERIES, definition.inputs).shape[-1]]
    return width or definition.const_axes[both.shape[-1]] - ROPE


def hiding(seen: torch.Tensor) -> torch.Tensor:
    """Zeros where a key is seen, else minus infinity."""
    return torch.zeros(seen.shape, dtype=torch.float64, device=seen.device).masked_fill(~seen, -math.inf)


def owned(inputs: Given, row: int, span: Span) -> torch.Tensor:
    """Keys that this rank owns, r, r + world, ..., up to each speculated token's place in the context."""
    world, rank = int(inputs["cp_world"]), int(inputs["cp_rank"])
    place = int(inputs["causal_seqlens_kv_global"][row]) + torch.arange(
        span.stop - span.start, device=span.rows.device
    )
    count = ((place - rank).div(world, rounding_mode="floor") + 1).clamp_min(0)
    return hiding((torch.arange(len(span.rows), device=place.device) < count[:, None])[None])


def named(lists: torch.Tensor, span: Span) -> torch.Tensor:
    """Keys in the blocks that lists [Hkv, T, topk] name, -1 none."""
    block = torch.arange(len(span.rows), device=lists.device) // MSA_BLOCK
    return hiding((lists[:, span.start : span.stop, :, None] == block).any(-2))


def blocked(definition: Definition, inputs: Given, row: int, span: Span, tokens: int) -> Span:
    """A sequence under its pattern of blocks; summaries of the others follow, and weigh as many keys."""
    height, width = (int(number(definition, inputs, name) or 0) for name in ("q_block_size", "kv_block_size"))
    length, device = len(span.rows), span.rows.device
    count = -(-length // width)
    if inputs.get("block_indptr") is not None:
        ends, lists = inputs["block_indptr"][row].tolist(), inputs["block_indices"].long()
        chosen = torch.zeros((len(ends), len(ends[0]) - 1, count), dtype=torch.bool, device=device)
        for head, bounds in enumerate(ends):
            for at, (start, stop) in enumerate(pairwise(bounds)):
                own = lists[start:stop]
                chosen[head, at, own[own < count]] = True
    else:
        chosen = words(inputs["exact_block_bits"][row])[..., :count]
    chosen = chosen.repeat_interleave(height, 1)[:, : span.stop - span.start]
    seen = chosen.repeat_interleave(width, 2)[..., :length]
    if inputs.get("kv_valid_bits") is not None:
        seen = seen & words(inputs["kv_valid_bits"][row])[:length]
    if "k_summary" not in inputs:
        return replace(span, bias=hiding(seen))
    mass = torch.full((count,), float(width), dtype=torch.float64, device=device)
    mass[-1:] = length - (count - 1) * width
    bias = torch.cat([hiding(seen), hiding(~chosen) + mass.log()], -1)
    own = torch.arange(count, device=device) + tokens + row * count
    return replace(span, rows=torch.cat([span.rows, own]), bias=bias)


# Cases and inputs


@dataclass(frozen=True, slots=True)
class CaseLayout:
    """Where keys and queries of a case lie."""

    definition: Definition
    case: Case
    ids: list[list[int]]  # pages of each sequence
    heads: int  # of keys
    shape: tuple[int, ...]  # of the input that is made

    @property
    def kv_lens(self) -> list[int]:
        """Keys of each sequence."""
        return list(self.case.params["kv_lens"])

    @property
    def q_lens(self) -> list[int]:
        """Queries of each sequence."""
        return list(self.case.params["q_lens"])

    @property
    def world(self) -> int:
        """Ranks that share the keys."""
        ranks = int(NUMBERS["cp_world"])
        return ranks // 2 if OTHER_SCALARS in self.case.params else ranks

    def coins(self, name: str, count: int) -> list[int]:
        """About half of the numbers below `count`, with 0."""
        host = HostDraw(definition=self.definition.name, case=f"{self.case.id} blocks", seed=self.case.seed)
        return [at for at, one in enumerate(host.integers(name, count, low=0, high=2)) if one or not at]

    @property
    def kept(self) -> list[tuple[int, list[int]]]:
        """Of each key head and sequence, this one's number, and which of its pages are selected: one is not."""
        found = []
        for head, (row, own) in product(range(self.heads), enumerate(self.ids)):
            lost = (head + 1) % len(own) if len(own) > 1 else -1
            found.append((row, [at for at in range(len(own)) if at != lost]))
        return found


def tables(of: CaseLayout) -> list[list[int]]:
    """Pages of each sequence, then one that nobody has; with a third axis those that each key head selects."""
    used = {page for own in of.ids for page in own}
    spare = min({*range(len(used) + 1)} - used)
    if listed(of.definition):  # of each query all but one, in turn
        own = [(ids, at % len(ids)) for ids in of.ids for at in range(of.shape[1])]
        found = [(ids[:lost] + ids[lost + 1 :] or ids)[: of.shape[2]] for ids, lost in own]
        return [[*ids, *[-1] * (of.shape[2] - len(ids))] for ids in found]
    rows = of.ids if len(of.shape) == 2 else [[of.ids[row][at] for at in own] for row, own in of.kept]
    return [[*own, *[spare] * (of.shape[-1] - len(own))] for own in rows]


def key_counts(of: CaseLayout) -> list[int]:
    """Keys of each sequence; of each key head and sequence, where heads select pages."""
    table = one_of(TABLES, of.definition.inputs)
    if table is None or len(table.shape) < 3 or listed(of.definition):
        return of.kv_lens
    page = page_of(of.definition)
    return [sum(min(page, of.kv_lens[row] - at * page) for at in own) for row, own in of.kept]


def block_lists(of: CaseLayout) -> list[list[int]]:
    """Of each sequence, head of the pattern, and block of queries, the blocks of keys that it sees."""
    height, width = (int(of.case.params[name]) for name in ("height", "width"))
    pattern = one_of(BLOCKED, of.definition.inputs)
    heads = of.definition.const_axes[pattern.shape[1]]
    rows = range(-(-of.q_lens[0] // height))
    return [
        of.coins(f"{row} {head} {at}", -(-length // width))
        for (row, length), head, at in product(enumerate(of.kv_lens), range(heads), rows)
    ]


def block_ends(of: CaseLayout) -> list[list[int]]:
    """Where the lists of each sequence and head begin and end."""
    lists = block_lists(of)
    rows, ends = of.shape[2] - 1, starts([len(own) for own in lists])
    return [ends[at : at + rows + 1] for at in range(0, len(lists), rows)]


def block_entries(of: CaseLayout) -> list[int]:
    """The lists, one after the other, with room behind."""
    entries = [block for own in block_lists(of) for block in own]
    return [*entries, *[0] * (of.shape[0] - len(entries))]


def block_bits(of: CaseLayout) -> list[list[int]]:
    """The lists as words of bits."""
    words = [[0] * of.shape[-1] for _ in block_lists(of)]
    for word, own in zip(words, block_lists(of), strict=True):
        for block in own:
            word[block // 32] |= 1 << block % 32
    return [[signed(one) for one in word] for word in words]


def signed(word: int) -> int:
    """32 bits as an int32."""
    return word - (1 << 32) if word >> 31 else word


def valid_bits(of: CaseLayout) -> list[list[int]]:
    """Any keys, but the first of each 32."""
    host = HostDraw(definition=of.definition.name, case=f"{of.case.id} valid", seed=of.case.seed)
    return [
        [one | 1 for one in host.integers(f"{row}", of.shape[1], low=0, high=1 << 31)]
        for row in range(of.shape[0])
    ]


def query_lists(of: CaseLayout) -> list[list[list[int]]]:
    """Of each key head and query, blocks of keys in order, then -1."""
    owner = [row for row, count in enumerate(of.q_lens) for _ in range(count)]
    found = []
    for head in range(of.shape[0]):
        lists = [
            of.coins(f"{head} {at}", -(-of.kv_lens[row] // MSA_BLOCK))[-of.shape[2] :]
            for at, row in enumerate(owner)
        ]
        if "causal" not in of.definition.inputs:  # which hides all but the first block from the first queries
            lists = [own[at % 2 :] or own for at, own in enumerate(lists)]
        found.append([[*own, *[-1] * (of.shape[2] - len(own))] for own in lists])
    return found


STRUCTURE: Mapping[str, Callable[[CaseLayout], Any]] = {
    **dict.fromkeys(TABLES, tables),
    **dict.fromkeys(KV_LENGTHS, key_counts),
    **dict.fromkeys(KV_ENDS, lambda of: starts(of.kv_lens)),
    **dict.fromkeys(ENDS, lambda of: starts(of.q_lens)),
    "actual_seq_lens_q": lambda of: of.q_lens,
    # so that the last of several speculated tokens sees all keys that this rank holds, the first one fewer
    "causal_seqlens_kv_global": lambda of: [(length - 1) * of.world for length in of.kv_lens],
    "block_indptr": block_ends,
    "block_indices": block_entries,
    "exact_block_bits": block_bits,
    "kv_valid_bits": valid_bits,
    "q2k_indices": query_lists,
}


class Tabled(Op):
    """Attention by one of these calls: `causal` where no input says; in pages, heads may lie behind tokens."""

    def __init__(
        self, op_type: str, *, family: str = "attention", causal: bool = False, heads_last: bool = False
    ) -> None:
        self.reading = {"heads_last": heads_last, "causal": causal}
        super().__init__(op_type, family=family, mutants=(*MUTANTS, *by_reading(**self.reading)), **SHARED)
        self.sizes_in_numbers = SILENT | {"q_block_size", "kv_block_size"}
        self.inputs_unread = dict.fromkeys(SILENT, "it says nothing of the result")

    def formula(
        self,
        wide: Wide,
        *,
        unscaled: bool = False,
        spans: Callable[[Spans], Spans] = tuple,
        **ways: Any,  # noqa: ANN401
    ) -> Tensors:
        """The attention, times the factor of its values where there is one."""

        def reading(inputs: Given) -> Operands:
            return read(wide.definition, inputs, **self.reading)

        found = attention(wide, read=reading, spans=spans, **ways)
        first, factor = next(iter(wide.definition.outputs.values())), one_of(FACTORS, wide.values)
        output = found["output"]
        if len(first.shape or ()) == 4:
            output = output.reshape(len(one_of(QUERIES, wide.values)), -1, *output.shape[1:])
        if factor is not None and not unscaled:
            output = output * float(factor)
        made = {**dict.fromkeys(("output", "output_out", "out_out"), output), "lse": found["lse"]}
        return {name: made[name] for name in wide.definition.outputs}

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Of the declaration; of queries in fp8 wider."""
        narrow = one_of(QUERIES, definition.inputs).dtype == CODES
        found = super().comparisons(definition).items()
        return {name: IN_FP8 if narrow and name != "lse" else kind for name, kind in found}

    def unread(self, definition: Definition) -> Mapping[str, str]:
        """Of the declaration, but the longest length where no other is given."""
        read = set() if one_of(KV_LENGTHS, definition.inputs) else {"max_sequence_kv"}
        return {name: why for name, why in super().unread(definition).items() if name not in read}

    def forms_of(self, definition: Definition) -> Sequence[Form]:
        """Forms of the inputs that a definition has, one for each way in which their axes may be meant."""
        choices: list[list[str]] = []
        for part in (definition.inputs, definition.outputs):
            for name, spec in part.items():
                axes = (
                    ("p s g e",)
                    if self.reading["heads_last"] and name in {"k_cache", "v_cache"}
                    else AXES.get(name, ())
                )
                known = [f"{name}[{one}]" for one in axes if len(one.split()) == len(spec.shape or ())]
                own = (
                    [f"{name}[{' '.join(f'{name}{at}' for at in range(len(spec.shape)))}]"]
                    if spec.shape
                    else [name]
                )
                if spec.shape is not None and (name in SILENT and part is definition.inputs):
                    known = own
                if spec.shape is None:
                    known = [name] * (name in SILENT or name in NUMBERS or name in SCALES)
                if not known:
                    raise Unsupported(f"inputs have unknown {name} of the shape {spec.shape}")
                choices.append(known)
            choices.append(["->"])
        return [Form(" ".join(one), self.formula) for one in product(*choices[:-1])]

    def _letters(self, definition: Definition) -> dict[str, str]:
        return self.form(definition).axes(definition)

    def _unsized(self, definition: Definition, form: Form) -> str | None:
        """Sizes follow from lengths; heads and widths must be fixed."""
        letters = form.axes(definition)
        stray = sorted(
            letters[one]
            for one in "hgdDeosc"
            if letters.get(one) in definition.var_axes and not (one == "o" and one_of(COMBINED, definition.inputs))
        )
        return f"can not tell the sizes of the axes {stray}" if stray else None

    def _case(
        self,
        definition: Definition,
        seed: int,
        name: str,
        lengths: Sequence[int],
        asked: int,
        *,
        whole: bool = False,
        **params: Any,  # noqa: ANN401
    ) -> Case:
        """A case of sequences of so many keys, about `asked` queries each; `whole`: as many as keys."""
        letters, page = self._letters(definition), page_of(definition)
        alone = {"t", "n"} <= letters.keys() and not {"i", "j"} & letters.keys()  # of one sequence
        alike = "qkv" in definition.inputs or letters.get("y") == letters.get("l", "")
        each_long = "l" in letters or ("max_sequence_kv" in definition.inputs and "b" in letters)
        kv_lens = [max(lengths)] * (1 if alone else len(lengths)) if each_long or alone else list(lengths)
        kv_lens = [-(-one // page) * page for one in kv_lens] if listed(definition) else kv_lens
        even = not any(
            not definition.inputs[name].optional for name in {*ENDS, "actual_seq_lens_q"} & {*definition.inputs}
        )
        fixed = definition.const_axes.get(letters.get("y", ""), 0)
        told = {"mask_type", "causal", "is_causal", "seqlen_q", "q_len_per_req", "causal_seqlens_kv_global"}
        told &= {*definition.inputs, *definition.axes}
        several = "a" in letters or bool(told - {"mask_type", "causal", "is_causal"}) or (told and "y" in letters)
        several = several or alone or listed(definition)
        height, width = (
            definition.const_axes.get(one, int(NUMBERS[one])) for one in ("q_block_size", "kv_block_size")
        )
        asked += 2 * height if "a" in letters else 0
        q_lens = [fixed or (max(1, asked) if several else 1)] * len(kv_lens)
        kv_lens = [max(one, q_lens[0]) for one in kv_lens] if even else kv_lens
        if not even:
            counts = [
                length if whole else 1 + (asked + at) % 7 * 2 * bool(asked) for at, length in enumerate(kv_lens)
            ]
            q_lens = [min(pair) for pair in zip(counts, kv_lens, strict=True)]
        q_lens = kv_lens if alike else q_lens
        pages = PageTable.of(kv_lens, page, shared=False)
        stored = definition.const_axes.get(letters.get("s", ""), 1)
        longest = max(kv_lens)
        rows, blocks = -(-q_lens[0] // height), -(-longest // width)
        heads = definition.const_axes.get(letters.get("a", ""), 1)
        scales = value_width(definition) * 2 // FP4_BLOCK  # of a row of codes
        sizes = {
            "b": len(kv_lens),
            "y": q_lens[0],
            "t": sum(q_lens),
            "n": sum(kv_lens),
            "l": longest,
            "p": -(-(pages.pool + 1) * page // stored),
            "m": max(pages.counts) + 1,
            "i": len(kv_lens) + 1,
            "j": len(kv_lens) + 1,
            "f": rows + 1,
            "r": rows,
            "u": blocks,
            "w": -(-blocks // 32),
            "z": -(-longest // 32),
            "x": len(kv_lens) * heads * rows * blocks,
            "o": value_width(definition),
            "k": -(-longest // MSA_BLOCK),
            **{
                one: swizzled_size(sum(own) * (definition.const_axes.get(letters.get(heads_of, ""), 1)), scales)
                for one, own, heads_of in (("A", q_lens, "h"), ("B", kv_lens, "g"))
            },
        }
        said = {
            "kv_lens": kv_lens,
            "q_lens": q_lens,
            "pattern": "lean",
            "amplitude": 1.0,
            "height": height,
            "width": width,
            **params,
        }
        return self.case(definition, name, sizes, seed, said)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """Lengths at random and at both sides of a page's end, a single key, patterns of data."""
        page = page_of(definition)
        for size in sizes:
            low, high = LENGTHS[size]
            for at, count in enumerate({"small": (1, 3), "medium": (4, 5), "large": (16, 32)}[size]):
                host = HostDraw(definition=definition.name, case=f"{size}-{at}", seed=seed)
                lengths = host.integers("kv_lens", count, low=low, high=high)
                lengths[-1] = page * -(-low // page) + (at if size != "small" else -at)
                if "qkv" in definition.inputs or "seq_len" in definition.inputs:  # as many queries
                    lengths = [min(length, SELF_LONGEST) for length in lengths]
                yield self._case(definition, seed, f"{size}-{at}", lengths, 1 + at * 10)
        yield self._case(definition, seed, "edge-single", [1], 1)
        if {*CAUSAL[:2]} & definition.inputs.keys():
            yield self._case(definition, seed, "edge-not-causal", [page + 2, 37], 9, causal=0)
        yield self._case(definition, seed, "adversarial-long", [640, 300], 3, amplitude=3.0)
        if "w" in self._letters(definition):  # words of bits for many blocks
            yield self._case(definition, seed, "adversarial-words", [int(NUMBERS["kv_block_size"]) * 133], 3)
        for pattern in PATTERNS:
            yield self._case(definition, seed, f"adversarial-{pattern}", [page + 2, 37], 9, pattern=pattern)
        small = tiny(definition)
        yield self._case(definition, seed, "adversarial-tiny", [page + 2, 37], 9, pattern="tiny", amplitude=small)

    def stress(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """Extreme logits, and equal keys."""
        for pattern in ("below", "above", "equal"):
            yield self._case(definition, seed, f"stress-{pattern}", [19, 37], 3, pattern=pattern)

    def boundaries(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """None: heads lean to such keys in all cases."""
        del definition, seed
        return ()

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """So many sequences, of lists some with several blocks; or one of so many keys and queries."""
        far = 2 * MSA_BLOCK * ("q2k_indices" in definition.inputs)
        lengths = [count] if long else [1 + 5 * (at % 7) + far * (at % 16 == 1) for at in range(count)]
        return replace(self._case(definition, case.seed, case.id, lengths, 3, whole=long), size=case.size)

    def lossless_case(self, definition: Definition, base: Case) -> Case:
        """Sequences of powers of two of keys."""
        found = self._case(definition, base.seed, base.id, [32, 64, 16, 8], 0)
        return replace(found, size=base.size)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Data of attention (`attention_inputs`) in the call's layout, over permuted pages; patterns of blocks."""
        letters, page = self._letters(definition), page_of(definition)
        known = {**definition.const_axes, **case.axes}
        sizes = {one: known[axis] for one, axis in letters.items() if axis in known}
        sizes.setdefault("o", value_width(definition))
        kv_lens, paged = list(case.params["kv_lens"]), "p" in letters
        ids = PageTable.of(kv_lens, page, shared=False).table(draw) if paged else []
        count = sizes["p"] * sizes["s"] if paged else sum(kv_lens)
        within, rows = torch.arange(page, device=draw.device), torch.arange(sum(kv_lens), device=draw.device)
        if paged:
            parts = [torch.tensor(own, device=draw.device)[:, None] * page + within for own in ids]
            rows = torch.cat([part.flatten()[:length] for part, length in zip(parts, kv_lens, strict=True)])
        q, k, v, scale = self._data(definition, case, draw, (rows, count, page), sizes)
        made: Values = dict.fromkeys(SCALES, scale)
        if not definition.inputs.keys() & SCALES and v.shape[-1] > sizes["o"]:  # of 1
            q = q * scale
        made |= dict.fromkeys(QUERIES, q)
        if "c" in letters and "qkv" in definition.inputs:
            made["qkv"] = torch.stack([q, k, v], 1)
        if paged:
            both = one_of(COMBINED, definition.inputs)
            last = self.reading["heads_last"] and both is None
            pages = [one.reshape(sizes["p"], sizes["s"], *one.shape[1:]) for one in (k, v)]
            pages = pages if last else [one.transpose(1, 2) for one in pages]
            latent = both is not None and len(both.shape) < 5
            made |= dict.fromkeys(COMBINED, k if latent else torch.stack(pages, 1))
            k, v = pages
        else:  # of each block a key that it has: a mean is not the same on all devices
            width = int(case.params["width"])
            each_long = sizes.get("l", 1)
            made |= {
                f"{name}_summary": part.reshape(-1, each_long, *part.shape[1:])[:, ::width]
                for name, part in (("k", k), ("v", v))
            }
        made |= dict.fromkeys(KEYS, k) | dict.fromkeys(VALUES, v)
        values: Values = {}
        for name, spec in definition.inputs.items():
            shape = definition.shape_of(spec, case.axes)
            found = made.get(name)
            if shape is None:
                values[name] = found if name in SCALES else self._number(definition, name, case)
            elif isinstance(found, torch.Tensor):
                values[name] = found.reshape(shape).to(dtype_of(spec)).contiguous()
            elif name == "sinks":  # beside negative logits they would have all the weight
                low = NEGATIVE if case.params["pattern"] == "negative" else 0.0
                values[name] = draw.normal(name, shape) - low
            elif name in STRUCTURE and not (spec.optional and name in ENDS):
                lists = STRUCTURE[name](CaseLayout(definition, case, ids, sizes.get("g", 1), shape))
                whole = torch.tensor(lists, dtype=torch.int32, device=draw.device).view(shape)
                values[name] = whole.view(dtype_of(spec))
            else:
                values[name] = (
                    None if spec.optional else torch.zeros(shape, dtype=dtype_of(spec), device=draw.device)
                )
        return ordered(definition, values)

    def _data(
        self,
        definition: Definition,
        case: Case,
        draw: Draw,
        keys: tuple[torch.Tensor, int, int],
        sizes: Mapping[str, int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Queries [t h d], keys [rows g d], values [rows g o] and the softmax scale; which rows are read."""
        rows, count, page = keys
        kv_lens, q_lens = list(case.params["kv_lens"]), list(case.params["q_lens"])
        first, visible, lengths = [], [], []
        says = {*CAUSAL} & {*definition.inputs}
        causal = bool(number(definition, NUMBERS if says else {}, *CAUSAL) or self.reading["causal"])
        causal = bool(case.params.get("causal", causal))
        for start, kv_len, q_len in zip(starts(kv_lens), kv_lens, q_lens, strict=False):
            first += [start] * q_len
            lengths += [kv_len] * q_len
            visible += [max(0, kv_len - q_len + at + 1) if causal else kv_len for at in range(q_len)]
        dtype = one_of(QUERIES, definition.inputs).dtype
        dtype = DType.BFLOAT16 if dtype in {CODES, DType.UINT8} else dtype
        letters = {"q": "thd", "k": "ngd", "v": "nge"}
        specs = {name: TensorSpec(shape=tuple(axes), dtype=dtype) for name, axes in letters.items()}
        plain = definition.model_copy(update={"inputs": specs})
        values = one_of(VALUES, definition.inputs)
        heads = sizes["h"] if "qkv" in definition.inputs else 1
        own = {"t": sum(q_lens), "n": count, "g": heads, **sizes, "e": sizes["o"]}
        own["e"] = own["e"] if values is None else definition.const_axes[values.shape[-1]]
        window = int(NUMBERS["window_left"]) if windowed(definition) else -1
        seen = Visible(rows, first, visible, lengths, page, window)
        data = drawn(plain, replace(case, axes=own | {"n": count}), draw, seen)
        q, k, v = (tensor(data, name) for name in "qkv")
        both = one_of(COMBINED, definition.inputs)
        if both is not None and len(both.shape) < 5:  # spare rows' values are a part of their keys
            unread = torch.ones(count, dtype=torch.bool, device=draw.device)
            unread[rows] = False
            k[unread, 0, sizes["o"] // 2] = POISON
        return q, k, v, scalar(data, "sm_scale")

    def _number(self, definition: Definition, name: str, case: Case) -> float | int | None:
        """A scalar: a size that lengths tell, one of NUMBERS; None where it is left at its default."""
        kv_lens, q_lens, height, width = (case.params[key] for key in ("kv_lens", "q_lens", "height", "width"))
        spec = definition.inputs[name]
        asked, longest = max(q_lens), max(kv_lens)
        known: Mapping[str, float] = {
            **dict.fromkeys(("max_kv_len", "max_seq_len", "max_sequence_kv", "max_seq_len_kv"), longest),
            **dict.fromkeys(
                ("max_seq_len_q", "max_q_len", "max_token_per_sequence", "q_len_per_req", "seqlen_q"), asked
            ),
            **dict.fromkeys(("batch_size", "batch_size_scalar"), len(kv_lens)),
            "q_block_size": height,
            "kv_block_size": width,
            "semantic_page_size": page_of(definition),
            "seq_len": asked,
        }
        if name in known:
            return known[name]
        if name == "window_left" and not windowed(definition):
            return None
        if name in CAUSAL and "causal" in case.params:
            return int(case.params["causal"])
        if name in NUMBERS:
            return NUMBERS[name] if spec.dtype.startswith("float") else int(NUMBERS[name])
        axis = definition.const_axes.get(name)
        return axis if axis is not None else None if spec.optional else 0

    def memory(self, definition: Definition, case: Case) -> int:
        """All tensors as the default has it, and of the longest sequence the logits of all heads, four times."""
        longest, asked = (int(max(case.params.get(name, [1]))) for name in ("kv_lens", "q_lens"))
        heads = dim(definition, next(name for name in QUERIES if name in definition.inputs), -2) or 1
        return super().memory(definition, case) + 32 * longest * asked * heads


def known(definition: Definition) -> str | None:
    """What of a call's numbers is not known; None: all is."""
    inputs = definition.inputs
    for name, spec in inputs.items():
        read = {"float16", "float32", *([CODES] if name in (*QUERIES, *KEYS, *VALUES, *COMBINED) else [])}
        if not spec.optional and spec.dtype.startswith("float") and spec.dtype not in read:
            return f"{name} is {spec.dtype}: this oracle knows no scaled storage"
    spec = one_of(QUERIES, inputs)
    if spec is None or not {*KEYS, *COMBINED, "qkv"} & inputs.keys():
        return "there are no queries, or no keys"
    widths = {
        definition.const_axes.get((one.shape or ("",))[-1])
        for name, one in inputs.items()
        if name in (*QUERIES, *KEYS, *COMBINED)
    }
    if len(widths) > 1:
        return f"queries and keys are {sorted(map(str, widths))} wide: keys are packed"
    paged = one_of(TABLES, inputs) is not None
    lengths = bool({*KV_LENGTHS, "max_sequence_kv"} & inputs.keys()) or listed(definition)
    if one_of((*COMBINED, "k_cache"), inputs) is not None and not (paged and lengths):
        return "nobody states which pages each sequence has, or how many keys"
    planes = [
        definition.const_axes.get((inputs[name].shape or ("", ""))[1])
        for name in COMBINED
        if name in inputs and len(inputs[name].shape or ()) > 3
    ]
    return f"the cache has {planes[0]} planes" if planes and planes[0] not in {1, 2} else None


# Ways of computing it, right and wrong


def paged(wide: Wide) -> bool:
    """Whether there is a table with several pages a sequence, in their order."""
    table = one_of(TABLES, wide.values)
    return table is not None and table.shape[-1] > 2 and not listed(wide.definition)


def biased(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Spans], Spans]:
    """Sequences with another mask of blocks."""
    return lambda spans: tuple(one if one.bias is None else replace(one, bias=change(one.bias)) for one in spans)


def patterned(wide: Wide) -> bool:
    """Whether blocks or places leave out keys."""
    masks = (*BLOCKED, "q2k_indices", "causal_seqlens_kv_global")
    return one_of(masks, wide.values) is not None and "k_summary" not in wide


def headed(wide: Wide) -> bool:
    """Whether key heads have patterns of their own."""
    pattern = one_of((*BLOCKED, "q2k_indices"), wide.values)
    return pattern is not None and pattern.shape[0 if "q2k_indices" in wide else 1] > 1


def tall(wide: Wide) -> bool:
    """Whether a sequence has several blocks of queries."""
    if "block_indptr" in wide:
        return wide.given("block_indptr").shape[2] > 2
    return "exact_block_bits" in wide and wide.given("exact_block_bits").shape[2] > 1


def by_reading(**reading: bool) -> tuple[Mutant, ...]:
    """Mutants of key heads, and of the causal mask, which is there by default or not."""

    def shared(wide: Wide) -> bool:
        """Whether several key heads are each shared by several queries' heads."""
        given = read(wide.definition, wide.values, **reading)
        return given.k.shape[1] not in {1, given.q.shape[1]}

    def applies(wide: Wide) -> bool:
        said = number(wide.definition, wide.values, *CAUSAL)
        q, b = one_of(QUERIES, wide.values), one_of(TABLES, wide.values)
        several = q.shape[:-2].numel() > (1 if b is None else len(b)) and not listed(wide.definition)
        return (reading["causal"] if said is None else bool(said)) and several

    def without(spans: Spans) -> Spans:
        return tuple(replace(one, causal=False) for one in spans)

    def late(spans: Spans) -> Spans:
        """The last key hidden from all, as if the diagonal were one before."""
        hide = (
            replace(one, rows=one.rows[:-1], bias=None if one.bias is None else one.bias[..., :-1])
            for one in spans
        )
        return tuple(hide)

    return (
        Mutant("values of the next head", applies=shared, values=lambda values: values.roll(1, 1)),
        Mutant("wrong head map", applies=shared, interleaved=True),
        Mutant("causal mask dropped", applies=applies, spans=without),
        Mutant("diagonal one before", applies=applies, spans=late),
    )


MUTANTS = (
    *(
        one
        for one in ATTENTION
        if one.name in {"uniform softmax", "softmax scale x 1.02", "no maximum subtracted"}
    ),
    Mutant("sums in bfloat16", precision="bfloat16"),
    Mutant(
        "weights in fp8",
        applies=lambda wide: one_of(QUERIES, wide.values).dtype.itemsize > 1,
        weights="float8_e4m3fn",
    ),
    altered("page table in the opposite order", *TABLES, change=lambda table: table.flip(-1), applies=paged),
    altered(
        "tables of the sequence before",
        *TABLES,
        change=lambda table: table.roll(1, -2),
        applies=lambda wide: one_of(TABLES, wide.values).shape[-2] > 1,
    ),
    altered(
        "one key fewer",
        *KV_LENGTHS,
        change=lambda lengths: (lengths.view(torch.int32) - 1).clamp_min(1).view(lengths.dtype),
        applies=lambda wide: paged(wide) and bool((one_of(KV_LENGTHS, wide.values).view(torch.int32) > 1).any()),
    ),
    Mutant("all blocks seen", applies=patterned, spans=biased(lambda bias: bias.clamp_min(-1e-9))),
    Mutant("blocks of the next key head", applies=headed, spans=biased(lambda bias: bias.roll(1, 0))),
    Mutant(
        "pattern of the queries before",
        applies=tall,
        spans=biased(lambda bias: bias.roll(int(NUMBERS["q_block_size"]), 1)),
    ),
    Mutant("summaries weigh one key each", applies=has("k_summary"), spans=biased(lambda bias: bias.clamp_max(0))),
    altered(
        "validity of keys not looked at",
        "kv_valid_bits",
        change=lambda bits: torch.full_like(bits.view(torch.int32), -1).view(bits.dtype),
    ),
    altered("another rank's keys", "cp_rank", change=lambda rank: rank - 1),
    Mutant(
        "factor of the values dropped",
        applies=lambda wide: one_of(FACTORS, wide.values) is not None,
        unscaled=True,
    ),
    altered("sinks dropped", "sinks", change=lambda sinks: sinks - 1e4),
)
SHARED: Any = {
    "uneven": "d",
    "requires": known,
    "apart": False,
    "coupled": True,
    "gates": GATES,
    "unusual": {"nan": QUERIES[:2], **dict.fromkeys(("large", "small"), (*VALUES, "kv_cache", "v_summary"))},
    # of patterns and owners it is no power of two of keys that a query sees; fp8 has no ties in bfloat16
    "lossless": lambda definition: (
        {}
        if one_of((*BLOCKED, "causal_seqlens_kv_global", "qkv"), definition.inputs)
        or one_of(QUERIES, definition.inputs).dtype == CODES
        else {
            **dict.fromkeys(QUERIES, 0.0),
            **dict.fromkeys((*KEYS, *VALUES, *COMBINED), full(0)),
            "sinks": NEVER,
            "window_left": 15.0,
        }
    ),
}


class Peaks(Tabled):
    """The largest logit of each tile of keys, of each head and query: MiniMax's proxy of attention."""

    def formula(
        self,
        wide: Wide,
        *,
        tile: int = MSA_BLOCK,
        largest: Callable[[torch.Tensor], torch.Tensor] = lambda part: part.amax(-1),
        spans: Callable[[Spans], Spans] = tuple,
        interleaved: bool = False,
        lay: Callable[..., torch.Tensor] = unswizzle,
        **_: Any,  # noqa: ANN401
    ) -> Tensors:
        """Unscaled products; minus infinity where a query sees no key of a tile. Codes are in nvfp4, in tiles."""
        values, factor = wide.values, 1.0
        for name in ("q", "k"):
            if f"{name}_fp4" in wide:
                codes, scales = wide.given(f"{name}_fp4"), wide.given(f"{name}_scale")
                rows, count = math.prod(codes.shape[:2]), codes.shape[2] * 2 // FP4_BLOCK
                scale = E4M3.decode(lay(scales, rows, count)).reshape(*codes.shape[:2], count)
                decoded = E2M1.decode(unpack(codes)) * scale.repeat_interleave(FP4_BLOCK, -1)
                values = {**values, name: decoded}
                factor *= wide.number(f"{name}_global_scale")
        given = read(wide.definition, values, **self.reading)
        heads = torch.arange(given.q.shape[1], device=given.q.device)
        heads = heads % given.k.shape[1] if interleaved else heads // (len(heads) // given.k.shape[1])
        longest = max((len(span.rows) for span in given.spans), default=0)
        shape = (given.q.shape[1], -(-longest // MSA_BLOCK), len(given.q))
        found = torch.full(shape, -math.inf, dtype=wide.dtype, device=given.q.device)
        for span in spans(given.spans):
            queries, keys = given.q[span.start : span.stop].to(wide.dtype), given.k[span.rows].to(wide.dtype)
            logits = torch.einsum("nhd,lhd->hnl", queries, keys[:, heads]) * factor
            place = torch.arange(len(queries), device=keys.device)[:, None] + len(keys) - len(queries)
            if span.causal:
                hidden = torch.arange(len(keys), device=keys.device) > place
                logits = logits.masked_fill(hidden, -math.inf)
            for at, part in enumerate(torch.split(logits, tile, -1)[: shape[1]]):
                found[:, at, span.start : span.stop] = largest(part)
        return {"max_score": found}

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Any codes, and scales between a half and two."""
        values = super().inputs(definition, case, draw)
        for name in values.keys() & {"q_fp4", "k_fp4", "q_scale", "k_scale"}:
            low, high = (0, 256) if name.endswith("fp4") else (0x30, 0x41)
            shape = tensor(values, name).shape
            values[name] = draw.integers(name, shape, torch.int32, low=low, high=high).to(torch.uint8)
        return values


MSA_PROXY = Peaks("msa_proxy", causal=True)
MSA_PROXY.gates, MSA_PROXY.spread, MSA_PROXY.lossless = {}, {"nan": QUERIES[:2]}, lambda _: {}
MSA_PROXY.mutants = (
    *(one for one in by_reading(causal=True, heads_last=False) if one.name != "values of the next head"),
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
        lay=lambda scales, rows, count: scales[: rows * count].view(rows, count),
    ),
    altered("another factor of all queries", "q_global_scale", change=lambda scale: scale * 1.02),
)
TRTLLM_PAGED = Tabled("trtllm_paged", causal=True)
CUDNN_PAGED = Tabled("cudnn_paged")
XQA = Tabled("xqa", heads_last=True)
BLOCK_SPARSE = Tabled("block_sparse")
MSA_SPARSE = Tabled("msa_sparse")
DCP = Tabled("trtllm_paged_dcp_spec")

# FlashInfer's functions, given what a definition has by its own names, and what they want beside it.

WORKSPACE = 128 << 20  # bytes
More = Callable[[Given], dict[str, Any]]
SM100 = ((10, 0), (12, 9))


def called(op: Op, name: str, serves: str, **conditions: Any) -> Callable[[More], More]:  # noqa: ANN401
    """Decorate what a function wants beside a definition's inputs: it is called by keyword.

    Outputs are in the order in which it gives them.
    """
    key = f"flashinfer.{name.replace('.', ':')}"

    def added(more: More) -> More:
        @op.truth("flashinfer", name, key, serves=serves, rows=None, **conditions)
        def _call(api: Api, definition: Definition, inputs: Given) -> Outputs:
            given = {**{one: value for one, value in inputs.items() if value is not None}, **more(inputs)}
            given = {one: value for one, value in given.items() if value is not None}
            found = api[key](**given)
            parts = found if isinstance(found, tuple) else (given.get("output") if found is None else found,)
            return dict(zip(definition.outputs, parts, strict=False))

        return more

    return added


def scratch(inputs: Given) -> dict[str, Any]:
    """Memory to work in."""
    q = one_of(QUERIES, inputs)
    return {"workspace_buffer": torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)}


def nothing(_: Given) -> dict[str, Any]:
    """The function takes a definition's inputs and no more."""
    return {}


def longest(inputs: Given, *names: str) -> int:
    """The largest number of the first of these inputs."""
    return int(one_of(names, inputs).max())


@called(
    XQA,
    "xqa.xqa",
    "q k_cache v_cache page_table seq_lens -> output",
    sm=((9, 0), (12, 9)),
)
def for_xqa(inputs: Given) -> dict[str, Any]:
    """Semaphores, and sizes of the cache."""
    return {
        **scratch(inputs),
        "seq_lens": inputs["seq_lens"].to(torch.uint32),
        "output": torch.empty_like(inputs["q"]),
        "semaphores": torch.zeros(8 << 20, dtype=torch.uint32, device=inputs["q"].device),
        "num_kv_heads": inputs["k_cache"].shape[2],
        "page_size": inputs["k_cache"].shape[1],
    }


@called(
    TRTLLM_PAGED,
    "prefill.trtllm_batch_context_with_kv_cache",
    "query kv_cache block_tables seq_lens bmm1_scale bmm2_scale cum_seq_lens_q [window_left] [sinks] -> output",
    sm=SM100,
)
def for_context(inputs: Given) -> dict[str, Any]:
    """The longest sequences, and where those of keys begin."""
    return {
        **scratch(inputs),
        "max_q_len": int(inputs["cum_seq_lens_q"].diff().max()),
        "max_kv_len": longest(inputs, "seq_lens"),
        "batch_size": len(inputs["seq_lens"]),
        "cum_seq_lens_kv": torch.nn.functional.pad(inputs["seq_lens"].cumsum(0), (1, 0)).int(),
        "sinks": None if inputs.get("sinks") is None else [inputs["sinks"]],
    }


@called(
    DCP,
    "decode.trtllm_batch_decode_with_kv_cache",
    "query k_cache v_cache block_tables seq_lens bmm1_scale bmm2_scale causal_seqlens_kv_global cp_world cp_rank"
    " -> output lse",
    sm=SM100,
)
def for_speculation(inputs: Given) -> dict[str, Any]:
    """Both caches as one argument, and the longest sequence."""
    return {
        **scratch(inputs),
        "kv_cache": (inputs["k_cache"], inputs["v_cache"]),
        **dict.fromkeys(("k_cache", "v_cache")),
        "max_seq_len": longest(inputs, "seq_lens"),
        "q_len_per_req": len(inputs["query"]) // len(inputs["seq_lens"]),
        "return_lse": True,
    }


@called(
    CUDNN_PAGED,
    "cudnn.cudnn_batch_prefill_with_kv_cache",
    "q k_cache v_cache scale actual_seq_lens_q actual_seq_lens_kv block_tables [causal] -> output lse",
    accepts=lambda definition: dim(definition, "q", 2) == 128,  # the only width without cuDNN's own graphs
    sm=((8, 0), (12, 9)),
)
def for_cudnn(inputs: Given) -> dict[str, Any]:
    """Lengths with four axes, the longest ones, and where queries begin."""
    return {
        **scratch(inputs),
        "max_token_per_sequence": longest(inputs, "actual_seq_lens_q"),
        "max_sequence_kv": longest(inputs, "actual_seq_lens_kv"),
        **{f"actual_seq_lens_{one}": inputs[f"actual_seq_lens_{one}"].view(-1, 1, 1, 1) for one in ("q", "kv")},
        "batch_offsets_q": torch.nn.functional.pad(inputs["actual_seq_lens_q"].cumsum(0), (1, 0)).int(),
        "batch_offsets_units": "tokens",
        "causal": bool(inputs.get("causal")),
        "return_lse": True,
    }


@called(
    CUDNN_PAGED,
    "cudnn.cudnn_batch_decode_with_kv_cache",
    "q k_cache v_cache scale max_sequence_kv block_tables [q_len_per_req] [window_left] [sinks] -> output",
    accepts=lambda definition: dim(definition, "q", 2) == 128,
    sm=((9, 0), (12, 9)),
)
def for_cudnn_decode(inputs: Given) -> dict[str, Any]:
    """As many keys of each sequence as the longest has."""
    table, most = inputs["block_tables"], int(inputs["max_sequence_kv"])
    return {**scratch(inputs), "actual_seq_lens_kv": torch.full((len(table),), most, device=table.device).int()}


@called(
    TRTLLM_PAGED,
    "prefill.trtllm_fmha_v2_prefill",
    "qkv bmm1_scale bmm2_scale cum_seq_lens_q cum_seq_lens_kv -> output",
    accepts=lambda definition: len(definition.inputs["qkv"].shape or ()) == 4,
    sm=((9, 0), (12, 9)),
)
def for_packed(inputs: Given) -> dict[str, Any]:
    """The layout, and lengths."""
    lengths = inputs["cum_seq_lens_kv"].diff()
    most = int(lengths.max())
    sizes = {"max_q_len": most, "max_kv_len": most, "batch_size": len(lengths)}
    return {**scratch(inputs), **sizes, "input_layout": "PACKED_QKV", "seq_lens": lengths}


FLAT = "cu_seqlens_q cu_seqlens_k [causal] -> max_score"
PROXY: Any = {
    "accepts": lambda definition: value_width(definition) == (64 if "q_fp4" in definition.inputs else 128),
    "sm": ((12, 0), (12, 9)),
}


@called(MSA_PROXY, "msa_ops.msa_proxy_score", f"q k {FLAT}", **PROXY)
@called(
    MSA_PROXY,
    "msa_ops.msa_proxy_score_fp4",
    f"q_fp4 k_fp4 q_scale k_scale q_global_scale k_global_scale {FLAT}",
    **PROXY,
)
def for_proxy(inputs: Given) -> dict[str, Any]:
    """Whether there is a causal mask."""
    return {"causal": bool(inputs.get("causal", True))}


def pattern(definition: Definition, inputs: Given) -> dict[str, Any]:
    """The pattern's own arguments."""
    found: dict[str, Any] = {name: definition.const_axes.get(name) for name in ("q_block_size", "kv_block_size")}
    words = ("exact_block_bits", "kv_valid_bits")
    found |= {name: inputs[name].view(torch.uint32) for name in words if inputs.get(name) is not None}
    heads = one_of(BLOCKED, inputs).shape[1]
    return {**found, "share_pattern_across_kv_heads": heads == 1 and one_of(QUERIES, inputs).shape[2] > 1}


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
    [attend], paged = api.values(), "block_tables" in inputs
    names = [
        "q",
        "sm_scale",
        *(("block_tables", "seq_lens_kv") if paged else ("k", "v", "k_summary", "v_summary")),
    ]
    lists = ["block_indptr", "block_indices"]
    given = {name: inputs[name] for name in [*names, *lists * paged] if inputs.get(name) is not None}
    if paged:
        cache, most = (inputs["k_cache"], inputs["v_cache"]), longest(inputs, "seq_lens_kv")
        return {
            "output": attend(**given, paged_kv_cache=cache, max_seq_len_kv=most, **pattern(definition, inputs))
        }
    form = "bsr" if "block_indptr" in inputs else "bitmask"
    given |= {name: inputs.get(name) for name in lists}
    return {
        "output": attend(
            **given, sparse_format=form, use_proxy_routes="k_summary" in inputs, **pattern(definition, inputs)
        )
    }


@called(
    MSA_SPARSE,
    "msa_ops.msa_sparse_attention",
    "q k v q2k_indices cu_seqlens_q cu_seqlens_k [causal] [softmax_scale] -> output",
    sm=SM100,
)
def for_lists(inputs: Given) -> dict[str, Any]:
    """Whether there is a causal mask."""
    return {"causal": bool(inputs.get("causal"))}
