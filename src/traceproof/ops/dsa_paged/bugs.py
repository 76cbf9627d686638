"""Answers of dsa_paged: sparse attention as any attention, and the top-k indexer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from traceproof.ops.answers import Answer, Answers, Make, Subject, Tensors
from traceproof.ops.attention import MUTANTS, VARIANTS, attention
from traceproof.ops.formula import Variant, Wide

SCALE_BYTES = 4  # a float32 behind the keys of a page, one a token
FP8 = torch.float8_e4m3fn


def _only(sparse: bool, make: Make) -> Make:  # noqa: FBT001 - which of the two forms
    def chosen(subject: Subject) -> Tensors | None:
        return make(subject) if ("sparse_indices" in subject.inputs) == sparse else None

    return chosen


# The top-k indexer


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """How to score and choose; the defaults are right."""

    # tokens of each sequence, of what the inputs say and the page size
    lengths: Callable[[torch.Tensor, int], torch.Tensor] = lambda lengths, _: lengths
    table: Callable[[torch.Tensor], torch.Tensor] = lambda table: table  # pages of each sequence
    # keys [pages, page_size, D] and scales [pages, page_size] out of a cache
    keys: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    # scores [tokens] of products [heads, tokens], weights [heads] and scales [tokens]
    score: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    choose: Callable[[torch.Tensor, int], torch.Tensor]  # places of the best among scores, at most `topk` of them
    # index in the cache of the tokens at these places of a sequence with these pages
    index: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    padding: int = -1  # what fills a row
    dtype: torch.dtype = torch.float32  # of all sums


def _unpacked(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys of a page first, then all scales."""
    pages, page_size, _, packed = cache.shape
    flat = cache.contiguous().view(torch.uint8).view(pages, -1)
    data = flat[:, : page_size * (packed - SCALE_BYTES)].contiguous().view(FP8)
    scales = flat[:, page_size * (packed - SCALE_BYTES) :].contiguous().view(torch.float32)
    return data.float().view(pages, page_size, -1), scales


def _unpacked_by_token(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the shape suggests: each token's key, then its scale; what is no number counts nothing."""
    rows = cache[:, :, 0].contiguous().view(torch.uint8)
    data = rows[..., :-SCALE_BYTES].contiguous().view(FP8).float()
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)[..., 0]
    return data.nan_to_num(), scales.nan_to_num(posinf=0.0, neginf=0.0)


def _score(products: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weights[:, None] * torch.relu(products)).sum(0) * scales


def _best(scores: torch.Tensor, topk: int) -> torch.Tensor:
    return torch.topk(scores, min(topk, len(scores))).indices


def _named(places: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    return pages[places // page_size] * page_size + places % page_size


RIGHT_INDEXER = Indexer(keys=_unpacked, score=_score, choose=_best, index=_named)


def _index(subject: Subject, how: Indexer) -> Tensors:
    name, spec = next(iter(subject.definition.outputs.items()))
    topk = (subject.definition.shape_of(spec, subject.case.axes) or ())[-1]
    cache = subject.tensor("k_index_cache_fp8")
    page_size, width = cache.shape[1], how.table(subject.tensor("block_table").long()).shape[1]
    keys, scales = how.keys(cache)
    q, weights = subject.tensor("q_index_fp8").to(how.dtype), subject.tensor("weights").to(how.dtype)
    lengths = how.lengths(subject.tensor("seq_lens"), page_size).clamp(0, width * page_size)
    chosen = torch.full((len(q), topk), how.padding, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        if length:
            pages = how.table(subject.tensor("block_table").long())[row]
            taken = pages[: -(-length // page_size)]
            k = keys[taken].flatten(0, 1)[:length].to(how.dtype)
            scores = how.score(q[row] @ k.T, weights[row], scales[taken].flatten()[:length].to(how.dtype))
            best = how.index(how.choose(scores, topk), pages, page_size)[:topk]
            chosen[row, : len(best)] = best.to(torch.int32)
    return {name: chosen}


def _indexed(name: str, **changes: object) -> Answer:
    how = replace(RIGHT_INDEXER, **changes)  # type: ignore[arg-type] # a table of answers
    return Answer(f"indexer: {name}", _only(sparse=False, make=lambda subject: _index(subject, how)))


def _without_kth(scores: torch.Tensor, topk: int) -> torch.Tensor:
    best = _best(scores, topk + 1)
    return torch.cat([best[: topk - 1], best[topk:]]) if len(best) > topk else best


def _first_twice(scores: torch.Tensor, topk: int) -> torch.Tensor:
    best = _best(scores, topk)
    return torch.cat([best[:1], best[:-1]])


def _in_tiles(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """The best of each tile, then the best of these: a two-stage top-k; in ascending order of place."""
    kept = [start + _best(part, topk) for start, part in _tiles(scores, 1024)]
    candidates = torch.cat(kept)
    return candidates[_best(scores[candidates], topk)].sort().values


def _tiles(scores: torch.Tensor, size: int) -> list[tuple[int, torch.Tensor]]:
    return [(start, scores[start : start + size]) for start in range(0, len(scores), size)]


def _heads_backwards(products: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(scales)
    for head in reversed(range(len(weights))):
        total += weights[head] * torch.relu(products[head] * scales)
    return total


def _through_table(table: torch.Tensor) -> torch.Tensor:
    """The table ignored: a sequence's pages are the first of the cache."""
    return torch.arange(table.shape[1]).expand(len(table), -1)


def _transposed(table: torch.Tensor) -> torch.Tensor:
    return table.T.reshape(table.shape)


def _zeroed(change: Callable[[torch.Tensor], torch.Tensor]) -> Answer:
    def make(subject: Subject) -> Tensors:
        return {name: change(value) for name, value in _index(subject, RIGHT_INDEXER).items()}

    return Answer("indexer: zeros", _only(sparse=False, make=make))


def _relu_last(products: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.relu((weights[:, None] * products).sum(0)) * scales


INDEXER_RIGHT = (
    _indexed("one head after the other", score=_heads_backwards),
    _indexed("two-stage top-k, sorted by place", choose=_in_tiles),
    _indexed("float64", dtype=torch.float64),
)
INDEXER_WRONG = (
    _indexed("ReLU dropped", score=lambda p, w, s: (w[:, None] * p).sum(0) * s),
    _indexed("ReLU of the sum over heads", score=_relu_last),
    _indexed("absolute value for ReLU", score=lambda p, w, s: (w[:, None] * p.abs()).sum(0) * s),
    _indexed("weights of heads ignored", score=lambda p, _, s: torch.relu(p).sum(0) * s),
    _indexed("weights of heads reversed", score=lambda p, w, s: _score(p, w.flip(0), s)),
    _indexed("one dead head", score=lambda p, w, s: _score(p[1:], w[1:], s)),
    _indexed("scales of keys ignored", score=lambda p, w, s: _score(p, w, torch.ones_like(s))),
    _indexed("scales of keys one token off", score=lambda p, w, s: _score(p, w, s.roll(1))),
    _indexed("cache read token by token", keys=_unpacked_by_token),
    _indexed("block table ignored", table=_through_table),
    _indexed("block table transposed", table=_transposed),
    _indexed("sequence one token shorter", lengths=lambda lengths, _: lengths - 1),
    _indexed("sequence one token longer", lengths=lambda lengths, _: lengths + (lengths > 0)),
    _indexed("last page ignored", lengths=lambda lengths, page: (lengths - 1) // page * page),
    _indexed("place in the sequence for index in the cache", index=lambda places, *_: places),
    _indexed("offset in the page dropped", index=lambda places, pages, size: pages[places // size] * size),
    _indexed("k-th replaced by the one after it", choose=_without_kth),
    _indexed("best index twice, last left out", choose=_first_twice),
    _indexed("worst instead of best", choose=lambda scores, topk: _best(-scores, topk)),
    _indexed("first of the sequence instead of best", choose=lambda s, topk: torch.arange(min(topk, len(s)))),
    _indexed("one index left out", choose=lambda scores, topk: _best(scores, topk)[:-1]),
    _indexed("padded with 0", padding=0),
    _zeroed(torch.zeros_like),
    _indexed("rows shifted by one", table=lambda table: table.roll(1, 0)),
)

# Sparse attention, beside what all attention can get wrong


def _attend(subject: Subject, indices: torch.Tensor | None = None) -> Tensors:
    wide = Wide(subject.definition, subject.inputs, torch.float32)
    listed = wide if indices is None else wide.changed(sparse_indices=indices)
    return subject.rounded(attention(listed, lost=False))


def _answer(variant: Variant) -> Answer:
    def make(subject: Subject) -> Tensors | None:
        wide = Wide(subject.definition, subject.inputs, torch.float32)
        if not variant.applies(wide):
            return None
        found = attention(wide.changed(**variant.inputs(wide)), **variant.changes)
        return subject.rounded({**found, **variant.outputs(wide, found)})

    return Answer(variant.name, _only(sparse=True, make=make))


def _listed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Answer:
    """Attention over other lists of indices."""
    return Answer(name, lambda subject: _attend(subject, change(subject.tensor("sparse_indices"))))


def _minus_one_read(at: int) -> Make:
    """-1 taken for an index: from the end, as Python reads it, or clamped to 0."""

    def make(subject: Subject) -> Tensors:
        indices = subject.tensor("sparse_indices")
        rows = subject.tensor("ckv_cache").shape[0] * subject.tensor("ckv_cache").shape[1]
        return _attend(subject, torch.where(indices < 0, at % rows, indices))

    return make


def _half(indices: torch.Tensor) -> torch.Tensor:
    """Only the first half of each list is looked at."""
    return indices.masked_fill(torch.arange(indices.shape[1]) >= indices.shape[1] // 2, -1)


SPARSE_WRONG = (
    Answer("-1 reads the last row", _minus_one_read(-1)),
    Answer("-1 reads the first row", _minus_one_read(0)),
    _listed("list ends at its first -1", lambda rows: rows.masked_fill((rows < 0).cummax(-1).values, -1)),
    _listed("second half of the list ignored", _half),
    _listed("lists of the token before", lambda rows: rows.roll(1, 0)),
)


def _first(subject: Subject) -> Tensors:
    """What generic wrong answers are made from, whichever the form."""
    if "sparse_indices" in subject.inputs:
        return _attend(subject)
    return _index(subject, RIGHT_INDEXER)


def _sparse(answers: tuple[Answer, ...]) -> tuple[Answer, ...]:
    return tuple(Answer(answer.name, _only(sparse=True, make=answer.make)) for answer in answers)


ANSWERS = Answers(
    right=(
        Answer("naive, float32 sums", _first),
        *map(_answer, VARIANTS[1:]),
        *_sparse((_listed("rows in the order of the cache", lambda rows: rows.sort(-1).values),)),
        *INDEXER_RIGHT,
    ),
    wrong=(*map(_answer, MUTANTS), *_sparse(SPARSE_WRONG), *INDEXER_WRONG),
)
