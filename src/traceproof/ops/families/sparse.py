"""DeepSeek's sparse attention over a paged cache: the indexer that lists tokens, and attention over its lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from traceproof.draw import Draw, HostDraw
from traceproof.lazy import torch
from traceproof.models.drafts import Extraction, call_of, compared_with, draft
from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading
from traceproof.ops import formats
from traceproof.ops.adapter import SM80, Api, Definition, Given, Outputs, asked, dim, scalar, tensor
from traceproof.ops.attention import Span, attention
from traceproof.ops.attention_inputs import PageTable, Planned, resized, tiny, within
from traceproof.ops.attention_op import MUTANTS, Attention
from traceproof.ops.base import Tensors, Values, ordered, specified
from traceproof.ops.cases import Case
from traceproof.ops.compare import IndexSet
from traceproof.ops.families.attention import LATENT_SIZES, SDPA, by_sdpa, differs, workspace
from traceproof.ops.families.blockscaled import ANY_BYTES, of_codes
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered, has, has_not, same
from traceproof.ops.lossless import full, one_hot
from traceproof.ops.op import LARGE_AND_SMALL, Op

# The indexer. A page of its cache holds page_size * D fp8 bytes, then page_size float32 scales, and is shaped
# [page_size, 1, D + 4] int8 without regard to that (DeepGEMM's layout). An index is page * page_size + offset, a
# row of the flattened cache; -1 fills a row of indices.

SCALE_BYTES = 4  # one float32 per token
DATACENTRE = ((10, 0), (10, 9))  # of Blackwell and Rubin
# How far a kernel's scores may be off, in units of sqrt(sum_h (w_h |q_h| |k_t|)^2), t the longest key. Hopper's
# fp8 tensor core keeps 14 bits of a running sum (DeepSeek-V3 report, section 3.3.2). Truncating to 13 fractional
# bits in groups of 32 errs by up to 0.12 of this bound on normal data. For planted keys it errs by 1.6 of it, but
# these lie far above all others. The bound is about 1 % of the scores' own spread.
SCORE_ERROR = 2.0**-12


def split_bytes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of cache pages: the keys' bytes, uint8 [pages * page_size, D], and the scales', [pages * page_size, 4]."""
    pages, page_size, _, packed = cache.shape
    width = packed - SCALE_BYTES
    flat = cache.contiguous().view(torch.uint8).view(pages, page_size * packed)
    keys, scales = flat[:, : page_size * width].contiguous(), flat[:, page_size * width :].contiguous()
    return keys.view(-1, width), scales.view(-1, SCALE_BYTES)


def fp8_keys(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys fp8 [pages * page_size, D] and scales float32 [pages * page_size, 1] of cache pages."""
    keys, scales = split_bytes(cache)
    return keys.view(torch.float8_e4m3fn), scales.view(torch.float32)


def fp8_keys_by_token(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mutant of `fp8_keys` that reads each token's key, then its scale, as the shape suggests; NaN become 0."""
    rows = cache.contiguous().view(torch.uint8).flatten(0, 2)
    keys = rows[:, :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return keys.nan_to_num(), scales.nan_to_num(posinf=0.0, neginf=0.0)


def mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values of pairs of fp4 codes, [..., D / 2] to float64 [..., D]; 32 neighbours share an e8m0 scale."""
    values = formats.E2M1.decode(formats.unpack(codes))
    return values * formats.E8M0.decode(scales).repeat_interleave(formats.MX_BLOCK, -1)


Unpack = Callable[["torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]]  # cache pages -> keys, scales
Score = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]  # products, weights -> scores
Choose = Callable[["torch.Tensor", int], "torch.Tensor"]  # scores of a row, k -> places of the best k


def score(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores [tokens]: the sum of weights [heads] times relu(products [heads, tokens])."""
    return weights @ torch.relu(products)


def best(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """int64 places of the `topk` largest scores, best first; fewer if there are fewer scores."""
    return torch.topk(scores, min(topk, len(scores))).indices


def without_kth(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """A mutant of `best`: the one after the k-th in its place."""
    places = best(scores, topk + 1)
    return torch.cat([places[: topk - 1], places[topk:]]) if len(places) > topk else places


def first_twice(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """A mutant of `best`: the first one twice, the last one left out."""
    places = best(scores, topk)
    return torch.cat([places[:1], places[:-1]])


def row_of(places: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Rows of the flattened cache that hold the tokens at these places of a sequence with these pages."""
    return pages[places // page_size] * page_size + places % page_size


def topk_of(definition: Definition) -> int:
    """Indices per sequence, if that axis is const; else 0."""
    return definition.const_axes.get((definition.outputs["topk_indices"].shape or ("", ""))[1], 0)


def outputs_changed(change: Part) -> Callable[[Wide, Tensors], Tensors]:
    """A mutant's `outputs`: each output changed by `change`."""
    return lambda _, outputs: {name: change(one) for name, one in outputs.items() if "@" not in name}


def largest(
    output: str,
    scores: torch.Tensor,
    lengths: torch.Tensor,
    count: int,
    *,
    chosen: Choose = best,
    numbers: torch.Tensor | None = None,  # int64 [rows, candidates]: what stands for a place; None: the place
) -> Tensors:
    """`output`, int32 [rows, count]: numbers of each row's best among its first `lengths` scores; -1 fills a row.

    The entries @scores, @candidates (number, or -1) and @tolerance (zeros) let IndexSet judge ties.
    """
    place = torch.arange(scores.shape[1], device=scores.device)
    numbers = place.expand(scores.shape) if numbers is None else numbers
    ends = lengths.long().clamp(0, len(place))
    beyond = place >= ends[:, None]
    indices = torch.full((len(scores), count), -1, dtype=torch.int32, device=scores.device)
    for row, length in enumerate(ends.tolist()):
        places = chosen(scores[row, :length], count)[:count]
        indices[row, : len(places)] = numbers[row, places].to(torch.int32)
    return {
        output: indices,
        f"{output}@scores": scores.masked_fill(beyond, -math.inf),
        f"{output}@candidates": torch.where(beyond, -1, numbers),
        f"{output}@tolerance": scores.new_zeros(len(scores)),
    }


def scores_of(
    wide: Wide,
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    longest: int,
    *,
    unpacked: Unpack = fp8_keys,  # unpacks pages of the cache
    change_scales: Part = same,  # changes scales of keys
    scored: Score = score,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [sequences, longest] of a sequence's keys, -inf beyond its length, and its longest key's length.

    `q` is [sequences, heads, D]. Keys are fp8 with a float32 scale; with `q_sf` fp4 with a scale per 32 values.
    """
    scores = torch.full((len(q), longest), -math.inf, dtype=wide.dtype, device=q.device)
    longest_keys = scores.new_zeros(len(q))
    for row, length in enumerate(wide["seq_lens"].tolist()):
        if not length:
            continue
        pages = cache[table[row, : -(-length // cache.shape[1])].long()]
        if "q_sf" in wide:
            codes, exponents = split_bytes(pages)
            keys = mxfp4_values(codes, change_scales(exponents)).to(wide.dtype)
        else:
            keys, scales = unpacked(pages)
            keys = keys.to(wide.dtype) * change_scales(scales.to(wide.dtype))
        scores[row, :length] = scored(q[row] @ keys[:length].T, wide["weights"][row])
        longest_keys[row] = keys[:length].norm(dim=-1).amax()
    return scores, longest_keys


def indexed(
    wide: Wide,
    *,
    chosen: Choose = best,
    numbered: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = row_of,
    **reading: Any,  # noqa: ANN401 - of `scores_of`
) -> Tensors:
    """The topk tokens of each sequence with the best `sum over heads h of weights[h] * relu(q[h] . k * scale)`.

    `topk_indices`, int32 [sequences, topk], are rows of the flattened cache, padded with -1. Mutants change the
    keywords: how tokens are chosen and numbered, and how keys are read and scored.
    """
    q, cache = wide["q_index_fp8"], wide["k_index_cache_fp8"]
    table, lengths = wide["block_table"], wide["seq_lens"]
    places = torch.arange(max(lengths.tolist(), default=0), device=q.device)
    scores, longest_keys = scores_of(wide, q, cache, table, len(places), **reading)
    numbers = places.expand(len(q), -1).clone()
    for row, pages in enumerate(table.long()):
        numbers[row] = numbered(places, pages, cache.shape[1])
    tolerance = SCORE_ERROR * (wide["weights"] * q.norm(dim=-1)).norm(dim=-1) * longest_keys
    outputs = largest("topk_indices", scores, lengths, topk_of(wide.definition), chosen=chosen, numbers=numbers)
    return outputs | {"topk_indices@tolerance": tolerance}


def indexer_logits(wide: Wide, **reading: Any) -> Tensors:  # noqa: ANN401 - of `scores_of`
    """The scores `logits` [sequences, max_seq_len] of one query per sequence, unspecified beyond its length.

    With `q_sf` queries and keys are fp4 codes, whose scales are of 32 neighbours; otherwise fp8, and one scale of
    a key is float32.
    """
    q = wide.given("q")[:, 0]
    if "q_sf" in wide:
        q = mxfp4_values(q, wide.given("q_sf")[:, 0, :, None].view(torch.uint8))
    pages, longest = wide["block_tables"], int(wide.number("max_seq_len"))
    logits, _ = scores_of(wide, q.to(wide.dtype), wide.given("kv_fused"), pages, longest, **reading)
    return {"logits": logits, "logits@free": torch.arange(longest, device=q.device) >= wide["seq_lens"][:, None]}


# Its cases. Patterns: `planted` (boundary tokens score high), `plain`, `negative` (all weights negative, so that a
# masked token's 0 would win), `zero` (ReLU cuts everything: all scores are 0, any choice is right), `outlier` (one
# channel of the keys is 4 times the others), `tiny` (weights at 1e-3), `ties` (small integers), `boundary` (topk
# tokens score high, so that the k-th best is far from the next).

DATA_SCALE = 16.0  # normal data times 16 stay below 70: fp8 reaches 448 and keeps 3 bits of mantissa down to 2**-6
POISON_SCALE = 64.0  # scale of tokens that no sequence may read; others stay below 4, so these win when read
PLANTED_SCALE = 4.0  # scale of tokens at boundaries, whose key is a copy of the query: they belong to the best


def fp8_drawn(draw: Draw, name: str, shape: Sequence[int], pattern: str) -> torch.Tensor:
    """Draw normal fp8 data; integers in -1..1 for `ties`; for `zero` queries above 0 and keys below."""
    if pattern == "ties":
        data = draw.integers(name, shape, torch.int32, low=-1, high=2).to(torch.float32)
    else:
        data = draw.normal(name, shape, torch.float32, scale=DATA_SCALE)
    if pattern == "zero":
        data = -data.abs() if name == "keys" else data.abs()
    return data.to(torch.float8_e4m3fn)  # round to nearest even on every device


def scales_drawn(draw: Draw, count: int) -> torch.Tensor:
    """Draw float32 scales [count], (1 + m / 8) * 2**e with m in 0..7 and e in -2..1, which are exact."""
    powers = torch.tensor([0.25, 0.5, 1.0, 2.0], device=draw.device)
    scales = draw.integers("scale mantissa", (count,), low=8, high=16).to(torch.float32) / 8
    return scales * powers[draw.integers("scale exponent", (count,), torch.int64, low=0, high=4)]


class Indexer(Op):
    """The indexer of one query of each sequence."""

    counted, roomy = "b", "pr"

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """Lengths around topk and around page boundaries; the block table always reaches topk tokens."""

        def integers(case: str, count: int, low: int, high: int) -> list[int]:
            draw = HostDraw(definition=definition.name, case=case, seed=seed)
            return draw.integers("seq_lens", count, low=low, high=high)

        page, topk = dim(definition, "k_index_cache_fp8", 1) or 1, topk_of(definition)
        fixed = self.fixed(definition)
        lists = {
            "small": (integers("small-0", 1, 2, 17), [1, *integers("small-1", 1, 2, 17)]),
            "medium": ([0, 1, page - 1, page, page + 1, 256], [topk - 1, topk + 1, 2 * topk, topk]),
            "large": (integers("large-0", 32, 512, 2 * topk + 512), integers("large-1", 64, 512, 2049)),
        }
        planned = [(f"{size}-{at}", lens, "planted") for size in sizes for at, lens in enumerate(lists[size])]
        planned += [("edge-all-empty", [0, 0], "planted"), ("edge-single", [1], "planted")]
        for pattern in ("plain", "negative", "zero", "outlier", "tiny", "ties", "boundary"):
            planned.append((f"adversarial-{pattern}", [topk + topk // 2 + 1, page + 1], pattern))
        for name, wanted, pattern in planned:
            lens = resized(wanted, count=fixed.get("b"))
            lens = within(lens, page, pages=fixed.get("p"), columns=fixed.get("r"))
            pages = PageTable.of(lens, page, shared=False)
            # One column more than needed: the table's unused entries name a page of poison.
            columns = max([-(-topk // page), *pages.counts]) + 1
            letters = {"b": len(lens), "p": pages.pool, "r": columns}
            yield self.case(definition, name, letters, seed, {"seq_lens": lens, "pattern": pattern})

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal fp8 data, scales over four powers of two, permuted pages, poison in tokens of no sequence."""
        shapes, _ = specified(definition, case, definition.inputs)
        pool, page_size, _, packed = shapes["k_index_cache_fp8"]
        pattern, lens = str(case.params["pattern"]), list(case.params["seq_lens"])
        q = fp8_drawn(draw, "q_index_fp8", shapes["q_index_fp8"], pattern)
        keys = fp8_drawn(draw, "keys", (pool * page_size, packed - SCALE_BYTES), pattern)
        if pattern == "outlier":
            channel = keys.shape[1] // 3
            keys[:, channel] = (keys[:, channel].to(torch.float32) * 4).to(keys.dtype)  # below 4 * 70 = 280
        scales = torch.ones(len(keys), device=draw.device) if pattern == "ties" else scales_drawn(draw, len(keys))
        weights = draw.normal("weights", shapes["weights"], scale=1e-3 if pattern == "tiny" else 1.0)
        if pattern == "negative":
            weights = -weights.abs()
        pages = PageTable.of(lens, page_size, shared=False).table(draw)
        spare = min(set(range(pool)).difference(*pages))  # a page of no sequence, for unused entries
        columns = shapes["block_table"][1]
        padded = [[*of_sequence, *[spare] * (columns - len(of_sequence))] for of_sequence in pages]
        table = torch.tensor(padded, dtype=torch.int32, device=draw.device).view(shapes["block_table"])
        # Per sequence the rows of the flattened cache with its tokens.
        rows = [
            row_of(torch.arange(length, device=draw.device), entries.long(), page_size)
            for entries, length in zip(table, lens, strict=True)
        ]
        unread = torch.ones(len(keys), dtype=torch.bool, device=draw.device)
        unread[torch.cat(rows)] = False
        scales[unread] = POISON_SCALE
        for sequence, tokens in enumerate(rows):
            length = len(tokens)
            if pattern == "planted":  # at page boundaries, so that losing one of these tokens shows
                ends = {0, length - 1, page_size - 1, page_size, (length - 1) // page_size * page_size}
                inside = sorted(place for place in ends if 0 <= place < length)
                places = torch.tensor(inside, dtype=torch.int64, device=draw.device)
            elif pattern == "boundary":  # topk of them, so that taking any other shows
                places = draw.permutation(f"high {sequence}", min(topk_of(definition), length), out_of=length)
            else:
                continue
            # The query of the head with the largest weight: the score is some six deviations above the others'.
            of_heads: list[float] = weights[sequence].tolist()
            query = q[sequence][of_heads.index(max(of_heads))]
            keys.view(torch.uint8)[tokens[places]] = query.view(torch.uint8)
            scales[tokens[places]] = PLANTED_SCALE
        parts = [part.contiguous().view(-1).view(torch.uint8).view(pool, -1) for part in (keys, scales)]
        cache = torch.cat(parts, 1).view(torch.int8).view(shapes["k_index_cache_fp8"])
        lengths = torch.tensor(lens, dtype=torch.int32, device=draw.device)
        values = {"q_index_fp8": q, "k_index_cache_fp8": cache, "weights": weights, "seq_lens": lengths}
        return ordered(definition, {**values, "block_table": table})


# Attention over the rows of the flattened cache that each token's list names, absorbed MLA otherwise. There is no
# causal mask, since the lists respect it. A token whose list is all -1 gives 0 and -inf.

SPARE = 3  # one more pool row per three named ones is in no list, and holds poison


class Listed(Attention):
    """Attention over lists of tokens: each query token is a sequence, whose keys its list names."""

    def planned_of(self, definition: Definition, sizes: Sequence[str], seed: int) -> Iterator[Planned]:
        """Tokens 1-2, 4-16, 32-64, with lists that are empty, short, one below full, and full."""
        topk = dim(definition, "sparse_indices", 1) or 0

        def integers(case: str, count: int, low: int) -> list[int]:
            draw = HostDraw(definition=definition.name, case=case, seed=seed)
            return draw.integers("valid", count, low=min(low, topk), high=topk + 1)

        short, few = min(16, topk), min(66, topk)
        lists = {
            "small": ([short], [1, short // 2 + 1]),
            "medium": ([0, 1, topk - 1, topk], [min(count, 256) for count in integers("medium-1", 16, 64)]),
            "large": ([0, 1, topk, *integers("large-0", 29, 512)], [topk] * 64),
        }
        yield from ((f"{size}-{at}", valid, 1, {}) for size in sizes for at, valid in enumerate(lists[size]))
        yield "edge-all-empty", [0, 0], 1, {}
        yield "edge-single", [1], 1, {}
        yield "adversarial-long", [topk, max(1, topk - 1), few], 1, {"amplitude": 3.0}
        yield "adversarial-holes", [few, 3, 0], 1, {"holes": True}  # -1 between the indices, not behind them
        for pattern in ("negative", "outlier", "ties"):
            yield f"adversarial-{pattern}", [few, 3], 1, {"pattern": pattern}
        yield "adversarial-tiny", [few, 3], 1, {"pattern": "tiny", "amplitude": tiny(definition)}

    def _case(self, definition: Definition, seed: int, planned: Planned) -> Case:
        """A case with lists of these lengths; the pool's first and last rows are in no list."""
        name, lengths, _, params = planned
        fixed, page = self.fixed(definition), dim(definition, "ckv_cache", 1) or 1
        lengths = resized(lengths, count=fixed.get("t"))
        if "p" in fixed:
            lengths = [min(length, max(0, fixed["p"] * page - 3) * SPARE // (SPARE + 1)) for length in lengths]
        longest = max(lengths, default=0)
        rows = longest + max(3, longest // SPARE)
        letters = {"t": len(lengths), "p": -(-rows // page)}
        usual = {"kv_lens": lengths, "pattern": "lean", "amplitude": 1.0, "holes": False}
        return self.case(definition, name, letters, seed, {**usual, **params})

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """The case unchanged."""
        del definition, count, long
        return case

    def lossless_case(self, definition: Definition, base: Case) -> Case:
        """Lists of a power of two of keys each."""
        topk = dim(definition, "sparse_indices", 1) or 0
        valid = [1 << power for power in range(7) if 1 << power <= topk]
        return replace(self._case(definition, base.seed, (base.id, valid, 1, {})), size=base.size)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """No cases."""
        del definition, seed
        return ()

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Distinct indices in random order; rows in no list hold poison, the first and the last among them.

        Those two are what a kernel reads that takes -1 for an index, from the end or clamped to 0. All tokens
        choose from the same rows, so their lists overlap.
        """
        shapes, _ = specified(definition, case, definition.inputs)
        lengths, topk = list(case.params["kv_lens"]), shapes["sparse_indices"][1]
        longest, pool = max(lengths, default=0), math.prod(shapes["ckv_cache"][:2])
        rows = draw.permutation("pool", longest, out_of=pool - 2) + 1
        indices = torch.full((len(lengths), topk), -1, dtype=torch.int32, device=draw.device)
        for token, count in enumerate(lengths):
            chosen = draw.permutation(f"sparse_indices {token}", count, out_of=longest)
            places = torch.arange(count, device=draw.device)
            if case.params["holes"]:
                places = draw.permutation(f"holes {token}", count, out_of=topk).sort().values
            indices[token, places] = rows[chosen].to(torch.int32)
        lists = [row[row >= 0].to(torch.int64) for row in indices]
        spans = tuple(Span(token, token + 1, rows, causal=False) for token, rows in enumerate(lists))
        data = self._data(definition, case, draw, spans)
        return ordered(definition, {**data, "sparse_indices": indices})


def last_page_ignored(wide: Wide) -> Mapping[str, torch.Tensor]:
    """A mutant's inputs: sequences end where their last page begins."""
    lengths, page = wide.given("seq_lens"), wide.given("k_index_cache_fp8").shape[1]
    return {"seq_lens": ((lengths - 1) // page * page).clamp_min(0)}


SCORING = (  # of products [heads, tokens] and weights [heads]
    Mutant("ReLU dropped", scored=lambda products, weights: weights @ products),
    Mutant("ReLU of the sum over heads", scored=lambda products, weights: torch.relu(weights @ products)),
    Mutant("absolute value for ReLU", scored=lambda products, weights: weights @ products.abs()),
    Mutant("weights of heads ignored", scored=lambda products, _: torch.relu(products).sum(0)),
    Mutant("weights of heads reversed", scored=lambda products, weights: score(products, weights.flip(0))),
    Mutant("first head not scored", scored=lambda products, weights: score(products[1:], weights[1:])),
    Mutant(
        "scales of keys ignored",
        change_scales=lambda scales: torch.full_like(scales, 1 if scales.is_floating_point() else 127),
    ),
    Mutant("scales of keys one token off", change_scales=lambda scales: scales.roll(1, 0)),
    Mutant("cache read token by token", applies=has_not("q_sf"), unpacked=fp8_keys_by_token),
    altered(
        "rows of the table shifted by one", "block_table", "block_tables", change=lambda table: table.roll(1, 0)
    ),
)
CHOOSING = (  # of scores
    Mutant("smallest in place of largest", chosen=lambda scores, topk: best(-scores, topk)),
    Mutant("k-th replaced by the one after it", chosen=without_kth),
    Mutant("the first one twice, the last left out", chosen=first_twice),
    Mutant("first of the row", chosen=lambda scores, topk: torch.arange(min(topk, len(scores)))),
    Mutant("padded with 0", outputs=outputs_changed(lambda indices: indices.clamp_min(0))),
)

INDEXER = Indexer(
    "dsa_paged",
    Form(
        "q_index_fp8[b h d] k_index_cache_fp8[p s g w] weights[b h] seq_lens[b] block_table[b r]"
        " -> topk_indices[b k]",
        indexed,
    ),
    where=f"g == 1; w == d + {SCALE_BYTES}",
    requires=lambda definition: (
        None if (kind := definition.inputs["q_index_fp8"].dtype) == "float8_e4m3fn" else f"q_index_fp8 is {kind}"
    ),
    sizes={"p": (), "r": ()},  # set by `cases`
    independent_rows=False,
    gates={"topk_indices": IndexSet()},
    mutants=(
        *SCORING,
        *CHOOSING,
        altered(
            "block table ignored",
            "block_table",
            change=lambda table: torch.arange(table.shape[1]).expand(table.shape),
        ),
        altered("block table transposed", "block_table", change=lambda table: table.T.reshape(table.shape)),
        altered("sequence one token shorter", "seq_lens", change=lambda lengths: (lengths - 1).clamp_min(0)),
        altered("sequence one token longer", "seq_lens", change=lambda lengths: lengths + (lengths > 0)),
        Mutant("last page ignored", inputs=last_page_ignored),
        Mutant("place in the sequence for index in the cache", numbered=lambda places, *_: places),
        Mutant("offset in the page dropped", numbered=lambda places, pages, size: pages[places // size] * size),
        Mutant("one index left out", chosen=lambda scores, topk: best(scores, topk)[:-1]),
        Mutant("all indices 0", outputs=outputs_changed(lambda indices: indices * 0)),
    ),
)
DSA_PAGED = Listed(
    "dsa_paged",
    Form(
        "q_nope[t h c] q_pe[t h R] ckv_cache[p s c] kpe_cache[p s R] sparse_indices[t k] sm_scale"
        " -> output[t h c] lse[t h]",
        attention,
    ),
    family="dsa",
    staged=True,
    without_api=lambda definition: "sparse_indices" not in definition.inputs,  # the indexer is DeepGEMM's
    other_forms=(INDEXER,),
    unusual={},
    mutants=(
        *MUTANTS,
        Mutant(  # as an index of Python does
            "-1 reads the last row",
            inputs=lambda wide: {"sparse_indices": wide["sparse_indices"] % len(wide["ckv_cache"].flatten(0, 1))},
        ),
        altered("-1 reads the first row", "sparse_indices", change=lambda rows: rows.clamp_min(0)),
        altered(
            "list ends at its first -1",
            "sparse_indices",
            change=lambda rows: rows.masked_fill((rows < 0).cummax(-1).values, -1),
        ),
        altered(
            "second half of the list ignored",
            "sparse_indices",
            change=lambda rows: rows.masked_fill(torch.arange(rows.shape[1]) >= rows.shape[1] // 2, -1),
        ),
        altered("lists of the token before", "sparse_indices", change=lambda rows: rows.roll(1, 0)),
    ),
)
LISTED = "q_nope q_pe ckv_cache kpe_cache sparse_indices sm_scale -> output lse"
NOPE = 128  # width of a query head before absorption in the models that use FlashInfer's kernel
SPARSE_MLA = "sparse_mla"


@DSA_PAGED.truth(
    "flashinfer",
    "trtllm_batch_decode_with_kv_cache_mla",
    SPARSE_MLA,
    serves=LISTED,
    accepts=lambda definition: (
        bool(dim(definition, "ckv_cache", 1)) and bool(dim(definition, "sparse_indices", 1))
    ),
    sm=DATACENTRE,
)
def _flashinfer(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """One cache has each token's latent and rotated part side by side; a row of indices is a row's page table.

    Kernels of SM 10.x, fetched as binaries.
    """
    q = torch.cat([inputs["q_nope"], inputs["q_pe"]], -1).unsqueeze(1)
    ckv, kpe, indices = tensor(inputs, "ckv_cache"), inputs["kpe_cache"], inputs["sparse_indices"]
    tokens, topk = indices.shape
    output, lse = api[SPARSE_MLA](
        query=q,
        kv_cache=torch.cat([ckv, kpe], -1).unsqueeze(1),
        workspace_buffer=workspace(q.device),
        qk_nope_head_dim=NOPE,
        kv_lora_rank=ckv.shape[-1],
        qk_rope_head_dim=kpe.shape[-1],
        block_tables=indices.view(tokens, 1, topk),
        seq_lens=(indices >= 0).sum(-1).to(torch.int32),
        max_seq_len=ckv.shape[0] * ckv.shape[1],
        sparse_mla_top_k=topk,
        bmm1_scale=scalar(inputs, "sm_scale"),
        bmm2_scale=1.0,
        return_lse=True,
    )
    return asked(definition, output=output.view(tokens, q.shape[2], -1), lse=lse.view(tokens, q.shape[2]))


DSA_PAGED.truth("torch", *SDPA, serves=LISTED)(by_sdpa)  # an index is a token of the flattened cache

# Sparse attention in models: the indexer, and absorbed attention over what it names.

PAGED = 64  # tokens per page of the indexer's cache: DeepGEMM has no other


def _sparse_call(module: ModelModule, _: Reading) -> KernelCall | None:
    """The call of absorbed sparse attention; None for any other, e.g. that over all of a short sequence."""
    facts = module.facts
    if not (facts.get("sparse") and facts.get("absorbed") and facts.get("topk")):
        return None
    return call_of(module, "dsa", "heads", "topk", ckv=facts["kv_lora_rank"], kpe=facts["rope_dim"])


def _sparse_differs(call: KernelCall, evidence: Evidence) -> str | None:
    named = {module.facts["topk"] for module in evidence.of("indexer")}
    wrong = differs(LATENT_SIZES, call, evidence)
    if wrong is None and call["topk"] not in named:
        return f"topk: SGLang {call['topk']}, transformers {sorted(named)}"
    return wrong


DSA_PAGED.extraction = Extraction(
    readers={
        "Indexer": (
            "indexer",
            lambda module, _: {"heads": module.n_heads, "dim": module.head_dim, "topk": module.index_topk},
        )
    },
    calls={"attention": _sparse_call, "indexer": lambda module, _: call_of(module, "dsa_indexer", *module.facts)},
    differs={"dsa": _sparse_differs, "dsa_indexer": compared_with("indexer", lambda facts, _: dict(facts))},
    drafts={
        "dsa": lambda call, choice: [
            draft(DSA_PAGED.op_type, "dsa_sparse_attention", {**dict(call.facts), "page_size": page_size})
            for page_size in choice.page_sizes
        ],
        "dsa_indexer": lambda call, _: [
            draft(
                DSA_PAGED.op_type,
                "dsa_topk_indexer",
                {**dict(call.facts), "page_size": PAGED, "with_scale": call["dim"] + SCALE_BYTES},
            )
        ],
    },
)

# paged_mqa_logits: the scores of the indexer, over all keys.


def queries_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw fp8 queries, or any bytes of fp4 codes."""
    if wanted.dtype is torch.float8_e4m3fn:
        return draw.normal(wanted.name, wanted.shape, scale=DATA_SCALE).to(wanted.dtype)
    return ANY_BYTES(draw, wanted)


def cache_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw pages of keys, then their scales 2**-2 to 2: fp4 and four e8m0 codes per key, or fp8 and a float32."""
    *tokens, packed = wanted.shape
    count, width = math.prod(tokens), packed - SCALE_BYTES
    exponents = draw.integers("scale", (count, SCALE_BYTES), low=125, high=129)
    if "q_sf" in wanted.definition.inputs:
        keys, scales = ANY_BYTES(draw, wanted).reshape(count, packed)[:, :width], exponents.to(torch.uint8)
    else:
        values = draw.normal(f"{wanted.name}.key", (count, width), scale=DATA_SCALE)
        keys = values.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.exp2(exponents[:, :1].float() - 127).view(torch.uint8)
    return torch.cat([part.reshape(wanted.shape[0], -1) for part in (keys, scales)], 1).view(wanted.shape)


def pages_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw pages of the pool in random order, int32; each second sequence shares the first one's first page."""
    pool = wanted.shape_of("kv_fused")[0]
    pages = draw.permutation(wanted.name, math.prod(wanted.shape), out_of=pool).int().view(wanted.shape)
    pages[1::2, :1] = pages[:1, :1]
    return pages


def counts_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Random lengths of sequences, of which the last is as long as the logits are wide."""
    _, width = wanted.definition.shape_of(wanted.definition.outputs["logits"], wanted.case.axes) or (0, 0)
    lengths = draw.integers(wanted.name, wanted.shape, low=1, high=width + 1)
    lengths[-1:] = width
    return lengths.to(wanted.dtype)


PAGED_MQA_LOGITS = Op(
    "paged_mqa_logits",
    Form(
        "q[b y h d] q_sf[b y h]? kv_fused[p s g w] weights[r h] block_tables[b m] seq_lens[b] max_seq_len"
        " -> logits[r l]",
        indexer_logits,
    ),
    family="dsa",
    where=f"y == 1; g == 1; w == d + {SCALE_BYTES}",
    requires=lambda definition: (
        f"fp4 queries of {width} bytes, and scales in {scales.dtype}"
        if (scales := definition.inputs.get("q_sf"))
        and ((width := dim(definition, "q", -1)) != 64 or scales.dtype.bits != 32)
        else None
    ),
    independent_rows=False,
    coupled=True,
    sizes={
        "l": (64, 40, 200, 333),
        "b": lambda size: size["r"],
        "m": lambda size: -(-size["l"] // size["s"]),
        "p": lambda size: size["b"] * size["m"] + 3,
    },
    roomy="mp",
    adversarial={"tiny": {"scale": 1e-3}},
    adversarial_inputs=("weights",),
    scalars={"max_seq_len": lambda at: at["l"]},
    draws={
        "q": queries_drawn,
        "q_sf": of_codes(125, 129),
        "kv_fused": cache_drawn,
        "block_tables": pages_drawn,
        "seq_lens": counts_drawn,
    },
    lossless=lambda definition: (
        # two codes per byte: of each head one code is 1.0 (byte 2)
        {"weights": full(0, most=9, signed=False), "q": lambda draw, one: one_hot(draw, one) * 2}
        if "q_sf" in definition.inputs
        else {}
    ),
    unusual={**LARGE_AND_SMALL, "nan": ("weights",)},
    mutants=(
        *SCORING,
        altered("block table reversed", "block_tables", change=lambda table: table.flip(1)),
        altered("the first sequence's length", "seq_lens", change=lambda counts: counts[:1].expand(counts.shape)),
        altered("scales of queries of the head before", "q_sf", change=lambda scales: scales.roll(1, -1)),
    ),
)

SCORED = "kv_fused weights block_tables seq_lens max_seq_len -> logits"
PAGED_MQA_LOGITS.called("attn_scores:fp8_paged_mqa_logits", f"q {SCORED}", sm=DATACENTRE)
PAGED_MQA_LOGITS.called("attn_scores:fp4_paged_mqa_logits", f"q q_sf {SCORED}", sm=DATACENTRE)

# topk: the places of the largest logits of each row, up to its length; msa_topk: of blocks of keys, some forced.


def largest_logits(wide: Wide, *, chosen: Choose = best, more: int = 0) -> Tensors:
    """Top-k of the first `seq_lens` (in a mutant `more`) logits of each row, as `largest` returns it."""
    return largest("indices", wide["logits"], wide["seq_lens"] + more, int(wide.number("top_k")), chosen=chosen)


def largest_blocks(wide: Wide, *, chosen: Choose = best, more: int = 0, forced: bool = True) -> Tensors:
    """Top-k blocks [queries, heads, topk] of max_score [heads, blocks, queries], of `num_valid_pages` if given.

    The first force_begin_blocks and the last force_end_blocks always win. Mutants change the keywords: `more` is
    added to the number of blocks.
    """
    scores = wide["max_score"].permute(2, 0, 1)
    queries, heads, width = scores.shape
    valid = wide.maybe("num_valid_pages")
    ends = scores.new_full((queries,), width).long() if valid is None else valid.long()
    ends = (ends + more).clamp(0, width).repeat_interleave(heads)
    scores = scores.reshape(-1, width)
    if forced:
        first, last = (int(wide.number(f"force_{side}_blocks", 0)) for side in ("begin", "end"))
        place = torch.arange(width, device=scores.device)
        scores = scores.masked_fill((place < first) | (place >= ends[:, None] - last), math.inf)
    topk = int(wide.number("topk"))
    blocks = largest("block_indices", scores, ends, topk, chosen=chosen)
    return blocks | {"block_indices": blocks["block_indices"].view(queries, heads, topk)}


def lengths_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw lengths from 1 to a row's width; of three or more the second is that width, the third 0."""
    width = wanted.shape_of("logits" if "logits" in wanted.definition.inputs else "max_score")[1]
    counts = draw.integers(wanted.name, wanted.shape, torch.int64, low=1, high=width + 1)
    if len(counts) > 2:
        counts[1], counts[2] = width, 0
    return counts.to(wanted.dtype)


OF_LARGEST = (
    Mutant("one beyond the length", more=1),
    Mutant("one short of the length", more=-1),
    Mutant("lengths not looked at", more=1 << 30),
    *CHOOSING,
)
MSA_TOPK = Op(
    "msa_topk",
    Form(
        "max_score[h p t] topk num_valid_pages[t]? force_begin_blocks? force_end_blocks? -> block_indices[t h k]",
        largest_blocks,
    ),
    family="dsa",
    draws={"num_valid_pages": lengths_drawn},
    scalars={"topk": lambda at: at["k"], "force_begin_blocks": 2, "force_end_blocks": 2},
    sizes={"p": (24, 7, 40, 65)},
    independent_rows=False,
    gates={"block_indices": IndexSet()},
    unusual=LARGE_AND_SMALL,
    mutants=(*OF_LARGEST, Mutant("none forced", applies=has("force_end_blocks"), forced=False)),
)
MSA_TOPK.called(
    "msa_ops:msa_topk_select",
    "max_score topk [num_valid_pages] [force_begin_blocks] [force_end_blocks] -> block_indices",
    accepts=lambda definition: (
        definition.const_axes.get((definition.outputs["block_indices"].shape or ("",))[-1]) == 16  # no other
    ),
    sm=((12, 0), (12, 9)),
)


TOPK = Op(
    "topk",
    Form("logits[b n] seq_lens[b] top_k pre_idx[b k]? -> indices[b k]", largest_logits),
    family="dsa",
    scalars={"top_k": lambda at: at["k"]},
    draws={"seq_lens": lengths_drawn},
    decisive=("logits",),
    independent_rows=False,
    gates={"indices": IndexSet()},
    unusual=LARGE_AND_SMALL,
    mutants=OF_LARGEST,
)
VARLEN = "flashinfer.topk_varlen:top_k_varlen"


@TOPK.truth("flashinfer", "top_k_varlen", VARLEN, serves="logits seq_lens top_k -> indices", sm=SM80)
def _flashinfer_topk(api: Api, _: Definition, inputs: Given) -> Outputs:
    return {"indices": api[VARLEN](inputs["logits"], inputs["seq_lens"], int(inputs["top_k"]))[0]}
