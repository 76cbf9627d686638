"""Inputs of attention for which wrong implementations give visibly wrong outputs.

Normal data alone hide much: over 2,048 keys the softmax is flat, the output near 0, and one token more or less is
lost in the rounding. So in the pattern `lean` each query head leans to one key that a bug is likely to get wrong:
the last visible one, the one after it that the mask hides, the first, both sides of the last page boundary, or
any. The lean is chosen so that this key takes about half the weight, whatever the length; the other half stays
spread over all other tokens.

Patterns: `lean`; `plain` (normal data, as kernels are usually tested); `negative` (all logits near -120, so that a
softmax that does not subtract the row's maximum divides 0 by 0); `outlier` (one key channel 32 times the others);
`below`, `above` (raw products near -60,000 and 60,000, beyond what masks have been filled with); `deep` (logits in
base 2 near -60,000, for masks that are filled after the scale); `equal` (all keys alike); `tiny` (everything at
the amplitude, values too); `ties` (integers in -1..1, so that many logits are equal, the largest too).

Rows that no sequence may read (the rest of a last page, unused pages) hold ordinary keys, so that they get an
ordinary weight whatever the query is, with values of 50. Not NaN: a kernel may multiply a masked row by a weight
of 0, which is right and would give NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

from traceproof.dataset.definition import Definition, DType
from traceproof.draw import Draw, HostDraw
from traceproof.lazy import torch
from traceproof.ops import attention as calls
from traceproof.ops import far
from traceproof.ops.attention import KeyLayout, Spans, listed, one_of, page_of
from traceproof.ops.base import Values
from traceproof.ops.cases import AFTER, OTHER_SCALARS, Case, is_hidden

POISON = 50.0  # value of rows that no sequence may read
LEAN = 0.75  # logit of the leaned-to key per doubling of the length: exp(0.75 n) slightly beats 2**n other keys
FLAT = 2.0  # deviation of logits up to which all keys share the weight; above, the largest few have it all
NEGATIVE = 120.0  # beyond 104, where exp(-x) is 0 in float32 even as a subnormal number
RAW = 60000.0  # of products of queries and keys before the softmax scale; float16 ends at 65,504
SIGNS: Mapping[str, int] = {"negative": -1, "below": -1, "deep": -1, "above": 1}
OUTLIER = 32.0  # a power of two, so that scaling is exact in every dtype
MEAN_ABS = math.sqrt(2 / math.pi)  # mean of |x|, x standard normal
# Width of a query's nope part before the up-projection is absorbed into it. The softmax scale is that of the form
# before absorption, 1 / sqrt(128 + 64), and the absorbed form's axes (512 and 64) no longer tell the 128. It is
# 128 in every published model with this attention (DeepSeek V2, V3, V3.2, Kimi K2).
QK_NOPE = 128
GAP = 4  # one page in four more than needed, so that tables have gaps


def tiny(definition: Definition) -> float:
    """An amplitude that is small for the values' dtype, and normal there.

    bfloat16 and float32 hold 1e-6 like any other number; what passes through float16 on its way, whose normal
    numbers end at 6e-5, loses it; those of fp8 end at 2**-6.
    """
    dtypes = {spec.dtype for spec in definition.inputs.values()}
    if DType.FLOAT8_E4M3FN in dtypes:
        return 2.0**-3
    return 1e-3 if DType.FLOAT16 in dtypes else 1e-6


@dataclass(frozen=True, slots=True)
class Style:
    """How one case draws its data."""

    pattern: str  # see above
    amplitude: float  # factor on queries and keys
    width: int  # channels of a key
    scale: float  # the softmax scale

    @classmethod
    def of(cls, case: Case, *, width: int, scale: float) -> Style:
        """The style that a case's params name, with the amplitude that its pattern needs."""
        pattern, amplitude = str(case.params["pattern"]), float(case.params["amplitude"])
        if pattern in SIGNS:
            product = {"negative": NEGATIVE / scale, "deep": RAW * math.log(2.0) / scale}.get(pattern, RAW)
            amplitude = math.sqrt(product / (MEAN_ABS * MEAN_ABS * width))  # mean of |q| . |k|: product
        return cls(pattern, amplitude, width, scale)

    def tensor(
        self, draw: Draw, name: str, shape: Sequence[int], dtype: torch.dtype, *, keys: bool
    ) -> torch.Tensor:
        """Draw queries, or keys with the sign that the pattern's products have, [..., D]."""
        if self.pattern == "ties":
            return draw.integers(name, shape, torch.int32, low=-1, high=2).to(dtype)
        made = draw.normal(name, shape, dtype, scale=self.amplitude)
        if self.pattern in SIGNS:
            made = made.abs() * (SIGNS[self.pattern] if keys else 1)
        if self.pattern == "equal" and keys and made.numel():
            made.copy_(made.reshape(-1, made.shape[-1])[0].clone().expand_as(made))
        return made


Specified = tuple[Mapping[str, tuple[int, ...]], Mapping[str, "torch.dtype"]]  # shapes and dtypes by name


def drawn(  # noqa: PLR0913 - all that a case's data depends on
    layout: KeyLayout, specs: Specified, case: Case, draw: Draw, *, spans: Spans, page: int
) -> Values:
    """Queries, keys, values and the softmax scale in the case's style; rows that no sequence reads hold POISON."""
    shapes, dtypes = specs
    unrotated = QK_NOPE if layout.latent else 0
    scale = float(torch.tensor(1 / math.sqrt(unrotated + shapes[layout.keys[-1]][-1]), dtype=torch.float32))
    style = Style.of(case, width=sum(shapes[name][-1] for name in layout.keys), scale=scale)
    data = {
        name: style.tensor(draw, name, shapes[name], dtypes[name], keys=name in layout.keys)
        for name in (*layout.queries, *layout.keys)
    }
    if style.pattern == "outlier":  # in the last part of a key: in a value it would hide errors
        last = data[layout.keys[-1]]
        last[..., last.shape[-1] // 3] *= OUTLIER
    if not layout.latent:
        size = style.amplitude if style.pattern == "tiny" else 1.0
        data[layout.values] = draw.normal(layout.values, shapes[layout.values], dtypes[layout.values], scale=size)
    values = layout.flat(data[layout.values])
    unread = torch.ones(len(values), dtype=torch.bool, device=draw.device)
    unread[torch.cat([span.rows for span in spans])] = False
    if layout.latent:  # One channel: a key of 50s has logits of +-80, and half of the heads would not show them.
        values[unread, 0, values.shape[-1] // 2] = POISON
    else:
        values[unread] = POISON
    lean = leaned_to(draw, style, spans, page, heads=shapes[layout.queries[0]][1])
    if lean is not None:
        rows, weights = lean
        for query, key in zip(layout.queries, layout.keys, strict=True):
            keys, heads = layout.flat(data[key]), data[query].shape[1]
            key_head = torch.arange(heads, device=draw.device) // max(1, heads // keys.shape[1])
            chosen = keys[rows, key_head].to(torch.float32)
            chosen *= weights[:, None, None]  # two roundings on every device: no fused multiply-add
            data[query] = (data[query].to(torch.float32) + chosen).to(data[query].dtype)
    return {**data, "sm_scale": scale}


def leaned_to(
    draw: Draw, style: Style, spans: Spans, page: int, *, heads: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows of the keys that query heads lean to, int64 [T, Hq], and how far: factors on the key, float32 [T].

    A factor is 0 where no key is visible. None where the pattern has no lean or there is nothing to lean to.
    """
    rows, device = torch.cat([span.rows for span in spans]), draw.device
    first, visible, lengths = [], [], []  # of each query's sequence; `visible` are keys that the query sees
    for start, span in zip(starts([len(span.rows) for span in spans]), spans, strict=False):
        queries, keys = span.stop - span.start, len(span.rows)
        hidden = range(queries - 1, -1, -1) if span.causal else [0] * queries  # keys that come after each query
        first += [start] * queries
        visible += [max(0, keys - after) for after in hidden]
        lengths += [keys] * queries
    if style.pattern != "lean" or not len(rows) or not visible:
        return None
    count, window = len(visible), spans[0].window
    seen, length, begin = (torch.tensor(x, device=device)[:, None] for x in (visible, lengths, first))
    last = (seen - 1).clamp(min=0)
    boundary = last // page * page
    low = (last - window).clamp(min=0) if window >= 0 else torch.zeros_like(last)
    random = draw.integers("lean", (count, heads), torch.int64, low=0, high=1 << 31) % (last - low + 1)
    after = torch.minimum(seen, length - 1).clamp(min=0)
    before = (boundary if window < 0 else low).sub(1).clamp(min=0)
    choices = (last, low, after, boundary, before, low + random)  # keys that bugs are likely to get wrong
    query = torch.arange(count, device=device)[:, None]
    kind = (query + torch.arange(heads, device=device)[None, :]) % len(choices)
    target = torch.stack([choice.expand(count, heads) for choice in choices]).gather(0, kind[None])[0] + begin
    energy = style.amplitude * style.amplitude * style.width * style.scale  # logit of a normal key with itself
    steep = max(1.0, energy / math.sqrt(style.width) / FLAT)  # more where logits vary by more than FLAT
    factors = [LEAN * steep * number.bit_length() / energy for number in visible]
    weights = torch.tensor(factors, dtype=torch.float32, device=device)
    return rows[target.clamp(max=len(rows) - 1)], weights


def starts(lengths: Sequence[int]) -> list[int]:
    """Prefix sums with a leading 0: an indptr."""
    return [0, *accumulate(lengths)]


def resized(lengths: Sequence[int], *, count: int | None = None, total: int | None = None) -> list[int]:
    """Lengths repeated, or left out, for `count` sequences, then cut or the last one extended to a `total`."""
    if count is not None:
        lengths = [lengths[at % len(lengths)] if lengths else 0 for at in range(count)]
    if total is None or not lengths:
        return list(lengths)
    ends = [0, *(min(end, total) for end in accumulate(lengths[:-1])), total]
    return [stop - start for start, stop in pairwise(ends)]


def within(lengths: Sequence[int], page: int, *, pages: int | None, columns: int | None) -> list[int]:
    """Lengths cut to what a cache of so many `pages` with gaps, and tables with a spare column, have room for."""
    rooms = [] if columns is None else [columns - 1]
    if pages is not None:
        rooms.append(max(1, (pages - 2) * GAP // (GAP + 1) // max(1, len(lengths))))
    return [min([length, *(page * room for room in rooms)]) for length in lengths]


@dataclass(frozen=True, slots=True)
class PageTable:
    """Pages of every sequence: their number, and how many of the first ones are those of sequence 0."""

    counts: list[int]
    shared: list[int]

    @classmethod
    def of(cls, kv_lens: list[int], page_size: int, *, shared: bool) -> PageTable:
        """Pages of sequences of these lengths; only full pages are shared, half of what could be."""
        counts = [-(-length // page_size) for length in kv_lens]
        full = [length // page_size for length in kv_lens]
        common = [(min(full[0], pages) + 1) // 2 if shared and row else 0 for row, pages in enumerate(full)]
        return cls(counts, common)

    @property
    def distinct(self) -> int:
        """Different pages in use."""
        return sum(self.counts) - sum(self.shared)

    @property
    def pool(self) -> int:
        """Pages to allocate: those in use and gaps, at least one."""
        return self.distinct + max(1, self.distinct // GAP)

    def table(self, draw: Draw) -> list[list[int]]:
        """Page ids of every sequence: distinct but for the shared ones, out of `pool`, never 0, 1, 2, ..."""
        pages: list[int] = draw.permutation("kv_indices", self.distinct, out_of=self.pool).tolist()
        if pages == list(range(self.distinct)):
            pages = [page + 1 for page in pages]
        table: list[list[int]] = []
        for count, common in zip(self.counts, self.shared, strict=True):
            fresh, pages = pages[: count - common], pages[count - common :]
            table.append([*(table[0][:common] if table else []), *fresh])
        return table


# Inputs that say where keys are.


@dataclass(frozen=True, slots=True)
class CaseLayout:
    """A case's lengths and pages, for drawing an input that says where keys and queries are."""

    definition: Definition
    case: Case
    kv_lens: list[int]  # keys of each sequence
    q_lens: list[int]  # queries of each sequence
    ids: list[list[int]]  # pages of each sequence
    heads: int  # of keys
    shape: tuple[int, ...]  # of the input that is made

    @property
    def ranks(self) -> int:
        """Ranks that share the keys."""
        ranks = int(calls.NUMBERS["cp_world"])
        return ranks // 2 if OTHER_SCALARS in self.case.params else ranks

    def some_below(self, name: str, count: int) -> list[int]:
        """Ascending numbers below `count`: 0, and each other one with probability 1/2, drawn on the host."""
        host = HostDraw(definition=self.definition.name, case=f"{self.case.id} blocks", seed=self.case.seed)
        heads = host.integers(name, count, low=0, high=2)
        return [at for at in range(count) if heads[at] or at == 0]

    @property
    def selected(self) -> list[tuple[int, list[int]]]:
        """(sequence, places of its selected pages) per key head and sequence: all pages but one."""
        selections = []
        for head, (sequence, pages) in product(range(self.heads), enumerate(self.ids)):
            left_out = (head + 1) % len(pages) if len(pages) > 1 else -1
            selections.append((sequence, [at for at in range(len(pages)) if at != left_out]))
        return selections


def tables(layout: CaseLayout) -> list[list[int]]:
    """Rows of page ids per sequence, key head or query, padded with an unused page (per query with -1)."""
    width = layout.shape[-1]
    if listed(layout.definition):  # each query has all pages but one, the next query another one
        rows = []
        for pages, query in product(layout.ids, range(layout.shape[1])):
            left_out = query % len(pages)
            rows.append((pages[:left_out] + pages[left_out + 1 :] or pages)[:width])
        paddings = [[-1] * (width - len(row)) for row in rows]
        first = is_hidden(layout.case.id)  # where -1 may be is not stated, so ordinary cases have it last
        return [padding + row if first else row + padding for row, padding in zip(rows, paddings, strict=True)]
    rows = layout.ids
    if len(layout.shape) > 2:
        rows = [[layout.ids[sequence][at] for at in places] for sequence, places in layout.selected]
    used = {page for pages in layout.ids for page in pages}
    spare = min({*range(len(used) + 1)} - used)
    return [[*row, *[spare] * (width - len(row))] for row in rows]


def key_counts(layout: CaseLayout) -> list[int]:
    """Keys of each sequence; where key heads select pages, those per key head and sequence."""
    if not calls.by_heads(layout.definition):
        return layout.kv_lens
    page = page_of(layout.definition)
    return [sum(min(page, layout.kv_lens[row] - at * page) for at in places) for row, places in layout.selected]


def block_lists(layout: CaseLayout) -> list[list[int]]:
    """Blocks of keys that are seen, per sequence, head of the pattern and block of queries."""
    height, width = calls.blocks_of(layout.definition)
    pattern = one_of(calls.BLOCKED, layout.definition.inputs)
    heads = range(layout.definition.const_axes[pattern.shape[1]])
    rows = range(-(-layout.q_lens[0] // height))
    return [
        layout.some_below(f"{sequence} {head} {row}", -(-length // width))
        for (sequence, length), head, row in product(enumerate(layout.kv_lens), heads, rows)
    ]


def block_ends(layout: CaseLayout) -> list[list[int]]:
    """Offsets of `block_lists` in their concatenation, per sequence and head."""
    lists = block_lists(layout)
    rows, ends = layout.shape[2] - 1, starts([len(blocks) for blocks in lists])
    return [ends[at : at + rows + 1] for at in range(0, len(lists), rows)]


def block_bits(layout: CaseLayout) -> list[list[int]]:
    """`block_lists` as bits in int32 words, the lowest bit first."""
    rows = []
    for blocks in block_lists(layout):
        words = [0] * layout.shape[-1]
        for block in blocks:
            words[block // 32] |= 1 << block % 32
        rows.append(list(map(signed, words)))
    return rows


def signed(word: int) -> int:
    """The int32 number with the 32 bits of an unsigned one."""
    return word - (word >> 31 << 32)


def valid_bits(layout: CaseLayout) -> list[list[int]]:
    """Random bits for valid keys, as words; the first bit is always set, the highest one in hidden cases alone."""
    host = HostDraw(definition=layout.definition.name, case=f"{layout.case.id} valid", seed=layout.case.seed)
    sequences, words = layout.shape
    bits = 32 if is_hidden(layout.case.id) else 31
    rows = [host.integers(f"{row}", words, low=0, high=1 << bits) for row in range(sequences)]
    return [[signed(word) | 1 for word in row] for row in rows]


def query_lists(layout: CaseLayout) -> list[list[list[int]]]:
    """Blocks of keys per key head and query, ascending, then -1."""
    lengths = [kv_len for kv_len, q_len in zip(layout.kv_lens, layout.q_lens, strict=True) for _ in range(q_len)]
    heads, _, most = layout.shape
    by_head = []
    for head in range(heads):
        lists = [
            layout.some_below(f"{head} {at}", -(-n // calls.MSA_BLOCK))[-most:] for at, n in enumerate(lengths)
        ]
        if "causal" not in layout.definition.inputs:  # a mask may leave queries the first block only
            lists = [blocks[at % 2 :] or blocks for at, blocks in enumerate(lists)]
        by_head.append([[*blocks, *[-1] * (most - len(blocks))] for blocks in lists])
    return by_head


# By input: a function that returns its elements as (nested) lists of integers.
STRUCTURE: Mapping[str, Callable[[CaseLayout], Any]] = {
    **dict.fromkeys(calls.TABLES, tables),
    **dict.fromkeys(calls.KV_LENGTHS, key_counts),
    **dict.fromkeys(calls.KV_ENDS, lambda layout: starts(layout.kv_lens)),
    **dict.fromkeys(calls.ENDS, lambda layout: starts(layout.q_lens)),
    "kv_indptr": lambda layout: starts(
        list(map(len, layout.ids)) if calls.POINTED in layout.definition.inputs else layout.kv_lens
    ),
    calls.POINTED: lambda layout: [page for pages in layout.ids for page in pages],
    "kv_last_page_len": lambda layout: [
        length - max(0, len(pages) - 1) * page_of(layout.definition)
        for length, pages in zip(layout.kv_lens, layout.ids, strict=True)
    ],
    "actual_seq_lens_q": lambda layout: layout.q_lens,
    # so that the last of several speculated tokens sees all keys that this rank holds, the first one fewer
    "causal_seqlens_kv_global": lambda layout: [(length - 1) * layout.ranks for length in layout.kv_lens],
    "block_indptr": block_ends,
    "block_indices": lambda layout: [block for blocks in block_lists(layout) for block in blocks],
    "exact_block_bits": block_bits,
    "kv_valid_bits": valid_bits,
    "q2k_indices": query_lists,
}

# Lengths of sequences. The sizes are the specification's: batch 1-2, 4-16, 32-64; sequence length 1-16, 64-256,
# 512-2048. The number of pages follows from lengths and page size (with page_size 1 a page is a token), which for
# page sizes of 16 to 64 lands in the specification's 1-4, 16-64, 128-256 and above.

# Most query tokens of a row, and longest row that is prefilled as a whole. A reference in Python loops over query
# tokens and heads, about 2 ms a token, so a medium case of 150 tokens costs it a third of a second.
QUERY_CAP = {"small": 16, "medium": 16, "large": 64}
WHOLE_CAP = {"small": 16, "medium": 128, "large": 640}
LONG = 2048  # tokens; the specification's longest sequence, where at amplitude 3 most planted bugs show
LONGEST = 131072  # tokens, of a case of size `stress`
# A case: its id, tokens of each sequence, its queries (unused in decode) or about how many each has, further
# drawing instructions.
Planned = tuple[str, list[int], list[int] | int, Mapping[str, Any]]


def sized(definition: Definition, seed: int, size: str, page: int) -> Iterator[Planned]:
    """Cases of a size: random lengths, and those at both sides of a page boundary.

    Of the queries, one row is a whole prompt, one a single token, one has none, the others a short suffix.
    """

    def draw(index: int) -> HostDraw:
        return HostDraw(definition=definition.name, case=f"{size}-{index}", seed=seed)

    def boundaries(near: int) -> list[int]:
        at = page * -(-near // page)
        return [at - 1, at, at + 1]

    if size == "small":
        batches: list[list[int]] = [draw(0).integers("kv_lens", 1, low=2, high=17)]
        batches.append([1, *draw(1).integers("kv_lens", 1, low=8, high=17)])
    elif size == "medium":
        batches = [draw(0).shuffled("kv_lens", [0, 1, *boundaries(64), 256])]
        batches += [draw(index).integers("kv_lens", count, low=64, high=257) for index, count in ((1, 12), (2, 4))]
        batches[1][:2] = [max(length, page + 1) for length in batches[1][:2]]  # a full page to share
    else:
        lengths = [0, 1, *boundaries(512), LONG, *draw(0).integers("random", 26, low=512, high=LONG)]
        batches = [draw(0).shuffled("kv_lens", lengths), draw(1).integers("kv_lens", 64, low=512, high=LONG + 1)]
    shared, plain = {"shared": True}, {"pattern": "plain"}
    params: Mapping[str, Mapping[str, Any]] = {"medium-1": shared, "large-1": shared, "medium-2": plain}
    for index, kv_lens in enumerate(batches):
        suffixes = draw(index).integers("q_lens", len(kv_lens), low=1, high=QUERY_CAP[size] + 1)
        q_lens = [min(pair) for pair in zip(suffixes, kv_lens, strict=True)]
        rows = [row for row, length in enumerate(kv_lens) if length > 0]
        prompt = max(rows, key=lambda row: kv_lens[row] * (kv_lens[row] <= WHOLE_CAP[size]))
        q_lens[prompt] = min(kv_lens[prompt], WHOLE_CAP[size])
        rows.remove(prompt)
        for row, count in zip(rows, (1, 0) if len(rows) > 2 else (1,), strict=False):
            q_lens[row] = count
        yield f"{size}-{index}", kv_lens, q_lens, params.get(f"{size}-{index}", {})


def at_window(definition: Definition) -> Iterator[Planned]:
    """A case of one query each over a window's keys, one more, and two more: the first one that hides a key."""
    if (window := calls.NUMBERS["window_left"]) and "window_left" in definition.inputs:
        lengths = [int(window) + more for more in (0, 1, 2)]
        yield "edge-window", lengths, [1] * len(lengths), {}


def always(definition: Definition, page: int, *, causal: bool) -> Iterator[Planned]:
    """Edge and adversarial cases: empty and single sequences, patterns of data."""
    short, queries = [page + 2, 17], [3, 17]
    yield "edge-empty-row", [5, 0, page + 1], [2, 3, 0], {}
    yield "edge-single", [1], [1], {}
    yield "edge-all-empty", [0, 0], [1, 2], {}
    yield from at_window(definition)
    if causal:
        yield "edge-q-longer", [3, 1, 9], [5, 4, 9], {}
    yield "adversarial-long", [LONG, LONG - 1, LONG // 2, 65], [8, 4, 1, 1], {"amplitude": 3.0}
    for pattern in ("negative", "outlier"):
        yield f"adversarial-{pattern}", short, queries, {"pattern": pattern}
    yield "adversarial-tiny", short, queries, {"pattern": "tiny", "amplitude": tiny(definition)}
    yield "adversarial-ties", short, queries, {"pattern": "ties"}


LENGTHS: Mapping[str, tuple[int, int]] = {"small": (2, 40), "medium": (64, 257), "large": (256, 700)}
COUNTS: Mapping[str, tuple[int, int]] = {"small": (1, 3), "medium": (4, 5), "large": (16, 32)}
SELF_LONGEST = 150  # tokens of a case in which all of them are queries


def all_query(definition: Definition) -> bool:
    """Whether all tokens of a call with tables are queries."""
    return not definition.inputs.keys().isdisjoint({"qkv", "seq_len"})


def tabled(
    definition: Definition, seed: int, sizes: Sequence[str], page: int, letters: Mapping[str, str]
) -> Iterator[Planned]:
    """Cases of calls with tables: lengths at random and at both sides of a page's end, a single key, patterns."""
    for size in sizes:
        low, high = LENGTHS[size]
        for at, count in enumerate(COUNTS[size]):
            host = HostDraw(definition=definition.name, case=f"{size}-{at}", seed=seed)
            lengths = host.integers("kv_lens", count, low=low, high=high)
            lengths[-1] = page * -(-low // page) + (at if size != "small" else -at)
            if all_query(definition):  # so fewer of them
                lengths = [min(length, SELF_LONGEST) for length in lengths]
            yield f"{size}-{at}", lengths, 1 + at * 10, {"shared": True} if at else {}
    yield "edge-single", [1], 1, {}
    yield from at_window(definition)
    if {*calls.CAUSAL[:2]} & definition.inputs.keys():
        yield "edge-not-causal", [page + 2, 37], 9, {"causal": 0}
    yield "adversarial-long", [640, 300], 3, {"amplitude": 3.0}
    if "w" in letters:  # words of bits for many blocks
        yield "adversarial-words", [int(calls.NUMBERS["kv_block_size"]) * 133], 3, {}
    for pattern in ("negative", "outlier", "ties"):
        yield f"adversarial-{pattern}", [page + 2, 37], 9, {"pattern": pattern}
    yield "adversarial-tiny", [page + 2, 37], 9, {"pattern": "tiny", "amplitude": tiny(definition)}


def stressing(page: int, pages: int, *, causal: bool) -> Iterator[Planned]:
    """Long contexts, extreme logits, equal keys, objects that served other lengths, a far cache if any."""
    yield "stress-long", [32768, 32767], [64, 1], {}
    if not causal:
        yield "stress-longest", [LONGEST - 1], [], {}
    for pattern in ("below", "deep", "above", "equal"):
        yield f"stress-{pattern}", [page + 2, 17], [3, 17], {"pattern": pattern}
    yield "stress-reused", [2 * page + 1, 0, 65, 1], [9, 2, 1, 1], {AFTER: "medium-1"}
    if pages:
        yield "stress-far", [LONG // 2, 65], [8, 65], {far.SIZE: pages}


def lengths_of(params: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Tokens of every sequence, and its queries: one in decode."""
    kv_lens = list(params["kv_lens"])
    return kv_lens, list(params.get("q_lens", [1] * len(kv_lens)))
