"""The indexer of sparse attention: score every cached token, name the topk best of each sequence.

score[t] = sum over heads h of weights[h] * relu(q[h] . k[t]) * scale[t]; the output names token t of a sequence by
page * page_size + offset, and is padded with -1. A page of the cache holds first page_size * D fp8 bytes, then
page_size float32 scales, and is shaped [page_size, 1, D + 4] int8 without regard to that (DeepGEMM's layout).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, HostDraw
from traceproof.ops.attention_inputs import Pages
from traceproof.ops.base import Op, Tensors, Unsupported, Values, ordered, tensor
from traceproof.ops.cases import Case
from traceproof.ops.compare import Comparison, IndexSet
from traceproof.ops.dsa_paged.sparse import const_size

RANKS = {"q_index_fp8": 3, "k_index_cache_fp8": 4, "weights": 2, "seq_lens": 1, "block_table": 2}
FP8 = torch.float8_e4m3fn
SCALE_BYTES = 4  # one float32 a token
DATA_SCALE = 16.0  # normal data times 16 stay below 70: fp8 reaches 448 and keeps 3 bits of mantissa down to 2**-6
POISON_SCALE = 64.0  # scale of tokens that no sequence may read; others stay below 4, so these win when read
PLANTED_SCALE = 4.0  # scale of tokens at boundaries, whose key is a copy of the query: they belong to the best
# How far a kernel's scores may be off, in units of sqrt(sum_h (w_h |q_h| |k_t|)^2), t the longest key. Hopper's
# fp8 tensor core keeps 14 bits of a running sum (DeepSeek-V3 report, section 3.3.2). Truncating to 13 fractional
# bits in groups of 32 errs by up to 0.12 of this bound on normal data. For planted keys it errs by 1.6 of it, but
# these lie far above all others. The bound is about 1 % of the scores' own spread.
SCORE_ERROR = 2.0**-12


@dataclass(frozen=True, slots=True)
class Plan:
    """One case: the sequences' lengths and how data are drawn."""

    id: str  # the case's id
    size: str  # the case's size class
    seq_lens: list[int]  # cached tokens of each sequence
    # `planted` (boundary tokens score high), `plain`, `negative` (all weights negative, so a masked token's 0
    # would win), `zero` (ReLU cuts everything: all scores are 0, any choice is right), `outlier` (one channel of
    # the keys is 4 times the others), `tiny` (weights at 1e-3), `ties` (small integers), `boundary` (just topk
    # tokens score high, so that the k-th best is far from the next)
    pattern: str = "planted"


class TopkIndexer(Op):
    """The form with a packed fp8 cache and a block table."""

    op_type = "dsa_paged"

    def check(self, definition: Definition) -> None:
        """Known: q [B, H, D] fp8, cache [pages, page_size, 1, D + 4] int8, weights, seq_lens, block_table."""
        if definition.inputs.keys() != RANKS.keys():
            raise Unsupported(f"inputs are {list(definition.inputs)}")
        for name, spec in definition.inputs.items():
            if len(spec.shape or ()) != RANKS[name]:
                raise Unsupported(f"{name} has shape {spec.shape}, known is rank {RANKS[name]}")
        if len(definition.outputs) != 1:
            raise Unsupported(f"outputs are {list(definition.outputs)}, known is one of indices")
        width = const_size(definition, "q_index_fp8", 2)
        packed = [const_size(definition, "k_index_cache_fp8", axis) for axis in (1, 2, 3)]
        if packed[1:] != [1, width + SCALE_BYTES]:
            raise Unsupported(f"the cache's last axes are {packed[1:]}, known is [1, {width + SCALE_BYTES}]")
        if definition.inputs["q_index_fp8"].dtype != "float8_e4m3fn":
            raise Unsupported(f"q_index_fp8 is {definition.inputs['q_index_fp8'].dtype}")
        self._topk(definition)

    @staticmethod
    def _topk(definition: Definition) -> int:
        axis = (next(iter(definition.outputs.values())).shape or ("",))[-1]
        if axis not in definition.const_axes:
            raise Unsupported(f"the output's axis {axis!r} is var, known is const")
        return definition.const_axes[axis]

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Lengths around topk and around page boundaries; the block table always reaches topk tokens."""
        page_size, topk = const_size(definition, "k_index_cache_fp8", 1), self._topk(definition)
        batch, pool, reach = (
            (definition.inputs[name].shape or ())[axis]
            for name, axis in (("q_index_fp8", 0), ("k_index_cache_fp8", 0), ("block_table", 1))
        )
        for plan in _plans(definition, sizes, topk=topk, page_size=page_size, seed=seed):
            pages = Pages.of(plan.seq_lens, page_size, shared=False)
            # One column more than needed: the table's unused entries name a page of poison.
            columns = max(-(-topk // page_size), *pages.counts) + 1
            axes = {batch: len(plan.seq_lens), pool: pages.pool, reach: columns}
            params = {"seq_lens": plan.seq_lens, "pattern": plan.pattern}
            yield Case(plan.id, plan.size, axes, seed, params)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal fp8 data, scales over four powers of two, permuted pages, poison where nobody may read."""
        shapes = {name: definition.shape_of(spec, case.axes) or () for name, spec in definition.inputs.items()}
        count, page_size, _, packed = shapes["k_index_cache_fp8"]
        columns = shapes["block_table"][1]
        pattern = str(case.params["pattern"])
        lens = list(case.params["seq_lens"])
        q = _fp8(draw, "q_index_fp8", shapes["q_index_fp8"], pattern)
        keys = _fp8(
            draw, "keys", (count * page_size, packed - SCALE_BYTES), "negated" if pattern == "zero" else pattern
        )
        if pattern == "outlier":
            channel = keys.shape[1] // 3
            keys[:, channel] = (keys[:, channel].to(torch.float32) * 4).to(FP8)  # below 4 * 70 = 280
        scales = _scales(draw, count * page_size, pattern)
        weights = draw.normal("weights", shapes["weights"], scale=1e-3 if pattern == "tiny" else 1.0)
        if pattern == "negative":
            weights = -weights.abs()
        table, rows = _table(draw, lens, page_size, columns, count)
        scales[_unread(rows, scales)] = POISON_SCALE
        topk = self._topk(definition)
        for row, taken in enumerate(rows):
            places = _high(draw, row, len(taken), pattern, page_size=page_size, topk=topk)
            _plant(keys, scales, taken[places], q[row], weights[row])
        cache = torch.cat([_bytes(keys, count), _bytes(scales, count)], 1)
        values = {
            "q_index_fp8": q,
            "k_index_cache_fp8": cache.view(torch.int8).view(shapes["k_index_cache_fp8"]),
            "weights": weights,
            "seq_lens": torch.tensor(lens, dtype=torch.int32, device=draw.device),
            "block_table": table,
        }
        return ordered(definition, values)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """Scores of all candidates in float64, their indices, and the best topk of them."""
        name, topk = next(iter(definition.outputs)), self._topk(definition)
        q = tensor(inputs, "q_index_fp8").to(torch.float64)
        weights = tensor(inputs, "weights").to(torch.float64)
        table, lens = tensor(inputs, "block_table").to(torch.int64), tensor(inputs, "seq_lens").tolist()
        cache = tensor(inputs, "k_index_cache_fp8")
        page_size, widest = cache.shape[1], max(lens, default=0)
        scores = torch.full((len(lens), widest), -math.inf, dtype=torch.float64, device=q.device)
        candidates = torch.full((len(lens), widest), -1, dtype=torch.int64, device=q.device)
        tolerance = torch.zeros(len(lens), dtype=torch.float64, device=q.device)
        best = torch.full((len(lens), topk), -1, dtype=torch.int32, device=q.device)
        offsets = torch.arange(page_size, device=q.device)
        for row, length in enumerate(lens):
            if length == 0:
                continue
            pages = table[row, : -(-length // page_size)]
            keys = _unpack(cache[pages])[:length]
            candidates[row, :length] = (pages[:, None] * page_size + offsets).view(-1)[:length]
            scores[row, :length] = weights[row] @ torch.relu(q[row] @ keys.T)
            unit = (weights[row] * q[row].norm(dim=-1)).norm() * keys.norm(dim=-1).amax()
            tolerance[row] = SCORE_ERROR * unit
            chosen = torch.topk(scores[row, :length], min(topk, length)).indices
            best[row, : len(chosen)] = candidates[row, chosen].to(torch.int32)
        return {
            name: best,
            f"{name}@scores": scores,
            f"{name}@candidates": candidates,
            f"{name}@tolerance": tolerance,
        }

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """A set of indices a row."""
        return {name: IndexSet() for name in definition.outputs}


def _plans(
    definition: Definition, sizes: Sequence[str], *, topk: int, page_size: int, seed: int
) -> Iterator[Plan]:
    def drawn(case: str, count: int, *, low: int, high: int) -> list[int]:
        draw = HostDraw(definition=definition.name, case=case, seed=seed)
        return draw.integers("seq_lens", count, low=low, high=high)

    lists = {
        "small": ([*drawn("small-0", 1, low=2, high=17)], [1, *drawn("small-1", 1, low=2, high=17)]),
        "medium": ([0, 1, page_size - 1, page_size, page_size + 1, 256], [topk - 1, topk + 1, 2 * topk, topk]),
        "large": (drawn("large-0", 32, low=512, high=2 * topk + 512), drawn("large-1", 64, low=512, high=2049)),
    }
    for size in sizes:
        for index, lens in enumerate(lists[size]):
            yield Plan(f"{size}-{index}", size, lens)
    yield Plan("edge-all-empty", "edge", [0, 0])
    yield Plan("edge-single", "edge", [1])
    longer = topk + topk // 2 + 1
    for pattern in ("plain", "negative", "zero", "outlier", "tiny", "ties", "boundary"):
        yield Plan(f"adversarial-{pattern}", "adversarial", [longer, page_size + 1], pattern)


def _fp8(draw: Draw, name: str, shape: Sequence[int], pattern: str) -> torch.Tensor:
    """Normal fp8 data; small integers for `ties`, of one sign for `zero` (positive) and `negated`."""
    if pattern == "ties":
        return draw.integers(name, shape, torch.int32, low=-1, high=2).to(torch.float32).to(FP8)
    drawn = draw.normal(name, shape, torch.float32, scale=DATA_SCALE)
    if pattern in ("zero", "negated"):
        drawn = drawn.abs() * (1 if pattern == "zero" else -1)
    return drawn.to(FP8)  # round to nearest even on every device


def _scales(draw: Draw, count: int, pattern: str) -> torch.Tensor:
    """float32 [count]: (1 + m / 8) * 2**e, e in -2..1, exact; all 1 for `ties`."""
    if pattern == "ties":
        return torch.ones(count, device=draw.device)
    powers = torch.tensor([0.25, 0.5, 1.0, 2.0], device=draw.device)
    steps = draw.integers("scale mantissa", (count,), low=8, high=16).to(torch.float32) / 8
    return steps * powers[draw.integers("scale exponent", (count,), torch.int64, low=0, high=4)]


def _table(
    draw: Draw, lens: list[int], page_size: int, columns: int, count: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The block table int32 [B, columns], and int64 rows of the flattened cache that each sequence reads."""
    ids = Pages.of(lens, page_size, shared=False).table(draw)
    spare = min(set(range(count)) - {page for pages in ids for page in pages})
    padded = [[*pages, *[spare] * (columns - len(pages))] for pages in ids]
    offsets = torch.arange(page_size)
    rows = []
    for pages, length in zip(ids, lens, strict=True):
        slots = torch.tensor(pages, dtype=torch.int64)[:, None] * page_size + offsets
        rows.append(slots.view(-1)[:length].to(draw.device))
    return torch.tensor(padded, dtype=torch.int32, device=draw.device).view(len(lens), columns), rows


def _unread(rows: list[torch.Tensor], scales: torch.Tensor) -> torch.Tensor:
    """Mask, like `scales`, of the rows of the flattened cache that no sequence reads."""
    unread = torch.ones_like(scales, dtype=torch.bool)
    for taken in rows:
        unread[taken] = False
    return unread


def _high(  # noqa: PLR0913 - the parts of one decision
    draw: Draw, row: int, length: int, pattern: str, *, page_size: int, topk: int
) -> torch.Tensor:
    """Places in a sequence of tokens that are sure to be among the best: int64.

    In `planted` the first and the last and those beside a page boundary, so that losing one of them shows; in
    `boundary` as many as are looked for, so that taking any other shows.
    """
    if pattern == "planted":
        wanted = {0, length - 1, page_size - 1, page_size, (length - 1) // page_size * page_size}
        inside = sorted(place for place in wanted if 0 <= place < length)
        return torch.tensor(inside, dtype=torch.int64, device=draw.device)
    if pattern == "boundary":
        return draw.permutation(f"high {row}", min(topk, length), out_of=length)
    return torch.empty(0, dtype=torch.int64, device=draw.device)


def _plant(
    keys: torch.Tensor, scales: torch.Tensor, marked: torch.Tensor, q: torch.Tensor, weights: torch.Tensor
) -> None:
    """Make rows of the flattened cache score high, in place.

    Their key is a copy of the query of the head with the largest weight: the score is some six deviations above
    the others'.
    """
    of_head: list[float] = weights.tolist()
    keys.view(torch.uint8)[marked] = q[of_head.index(max(of_head))].view(torch.uint8)
    scales[marked] = PLANTED_SCALE


def _bytes(tensor: torch.Tensor, pages: int) -> torch.Tensor:
    """uint8 [pages, bytes a page] of a tensor laid out page by page."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(pages, -1)


def _unpack(cache: torch.Tensor) -> torch.Tensor:
    """Keys times scales, float64 [pages * page_size, D], of cache pages [pages, page_size, 1, D + 4] int8."""
    pages, page_size, _, packed = cache.shape
    width = packed - SCALE_BYTES
    flat = cache.contiguous().view(torch.uint8).view(pages, page_size * packed)
    data = flat[:, : page_size * width].contiguous().view(FP8).to(torch.float64).view(-1, width)
    scales = flat[:, page_size * width :].contiguous().view(torch.float32).to(torch.float64).view(-1, 1)
    return data * scales
