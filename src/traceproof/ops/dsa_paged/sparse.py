"""Sparse attention: each token attends to the cache rows that its list of indices names, absorbed MLA otherwise.

An index is page * page_size + offset, that is a row of the flattened cache; -1 names nothing. There is no causal
mask: who made the list has seen to that. A token whose list is all -1 gives 0 and -inf.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, HostDraw
from traceproof.ops.base import Values, ordered, scalar, specified, tensor
from traceproof.ops.cases import Case
from traceproof.ops.common import mla
from traceproof.ops.common.attention import Operands, Span, const_size, require
from traceproof.ops.common.attention_cases import tiny
from traceproof.ops.common.attention_inputs import Sequences
from traceproof.ops.common.attention_op import AttentionFormula
from traceproof.ops.common.paging import starts, unread

RANKS = {"q_nope": 3, "q_pe": 3, "ckv_cache": 3, "kpe_cache": 3, "sparse_indices": 2, "sm_scale": None}
SPARE = 3  # one pool row in three is named by nobody, and holds poison


@dataclass(frozen=True, slots=True)
class Plan:
    """One case: how many indices each token names (at most topk), and how its data are drawn."""

    id: str  # the case's id
    size: str  # the case's size class
    valid: list[int]  # indices of each token
    pattern: str = "lean"  # see `attention_inputs`
    amplitude: float = 1.0  # factor on queries and keys
    holes: bool = False  # the -1 stand between the indices instead of behind them


class SparseAttention(AttentionFormula):
    """The form with `sparse_indices`."""

    op_type = "dsa_paged"

    def check(self, definition: Definition) -> None:
        """Known: queries [T, H, D], caches [pages, page_size, D], sparse_indices [T, topk], sm_scale."""
        require(definition, RANKS)
        mla.require_widths(definition)
        const_size(definition, "sparse_indices", 1)
        const_size(definition, "ckv_cache", 1)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Tokens 1-2, 4-16, 32-64, with lists that are empty, short, one below full, and full."""
        topk, page_size = const_size(definition, "sparse_indices", 1), const_size(definition, "ckv_cache", 1)
        tokens, pool = ((definition.inputs[name].shape or ())[0] for name in ("q_nope", "ckv_cache"))
        for plan in _plans(definition, sizes, topk=topk, seed=seed):
            named = max(plan.valid, default=0)
            rows = named + max(3, named // SPARE)  # the first and the last row of the pool are always spare
            axes = {tokens: len(plan.valid), pool: -(-rows // page_size)}
            params = {
                "valid": plan.valid,
                "pattern": plan.pattern,
                "amplitude": plan.amplitude,
                "holes": plan.holes,
            }
            yield Case(plan.id, plan.size, axes, seed, params)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Distinct indices in random order; rows that nobody names hold poison, the first and the last among them.

        Those two are what a kernel reads that takes -1 for an index, from the end or clamped to 0.
        """
        shapes, dtypes = specified(definition, case, definition.inputs)
        kpe_width = shapes["kpe_cache"][-1]
        style = mla.style_of(case, ckv=shapes["ckv_cache"][-1], kpe=kpe_width)
        data = mla.drawn(draw, style, shapes, dtypes)
        ckv, kpe = data["ckv_cache"].flatten(0, 1), data["kpe_cache"].flatten(0, 1)
        valid = list(case.params["valid"])
        topk = shapes["sparse_indices"][1]
        indices = _indices(draw, valid, topk, len(ckv), holes=bool(case.params["holes"]))
        rows = indices[indices >= 0].to(torch.int64)
        mla.poison_(ckv, unread(rows, data["ckv_cache"]))
        sequences = Sequences(rows, starts(valid)[:-1], valid, valid, 1)
        data["q_nope"], data["q_pe"] = mla.queries(
            draw, style, nope=data["q_nope"], pe=data["q_pe"], ckv=ckv, kpe=kpe, sequences=sequences
        )
        return ordered(definition, {**data, "sparse_indices": indices, "sm_scale": mla.sm_scale(kpe_width)})

    def operands(self, definition: Definition, inputs: Values) -> Operands:
        """The inputs as queries, flattened keys and values, and one span per token."""
        del definition
        ckv, kpe = tensor(inputs, "ckv_cache"), tensor(inputs, "kpe_cache")
        q = torch.cat([tensor(inputs, "q_nope"), tensor(inputs, "q_pe")], -1)
        k, v = mla.keys(ckv.flatten(0, 1), kpe.flatten(0, 1))
        lists = tensor(inputs, "sparse_indices").to(torch.int64)
        spans = (Span(token, token + 1, row[row >= 0], causal=False) for token, row in enumerate(lists))
        return Operands(q, k, v, tuple(spans), scalar(inputs, "sm_scale"))

    def memory(self, definition: Definition, case: Case) -> int:
        """Caches and queries as stored and in float32, and one token's gathered keys, in float64 four times."""
        topk = const_size(definition, "sparse_indices", 1)
        width = sum(const_size(definition, name, -1) for name in ("q_nope", "q_pe"))
        return super().memory(definition, case) + 4 * 8 * topk * width


def _plans(definition: Definition, sizes: Sequence[str], *, topk: int, seed: int) -> Iterator[Plan]:
    def drawn(case: str, count: int, low: int) -> list[int]:
        draw = HostDraw(definition=definition.name, case=case, seed=seed)
        return draw.integers("valid", count, low=min(low, topk), high=topk + 1)

    short = min(16, topk)
    lists = {
        "small": ([short], [1, short // 2 + 1]),
        "medium": ([0, 1, topk - 1, topk], [min(count, 256) for count in drawn("medium-1", 16, 64)]),
        "large": ([0, 1, topk, *drawn("large-0", 29, 512)], [topk] * 64),
    }
    for size in sizes:
        for index, valid in enumerate(lists[size]):
            yield Plan(f"{size}-{index}", size, valid)
    few = min(66, topk)
    yield Plan("edge-all-empty", "edge", [0, 0])
    yield Plan("edge-single", "edge", [1])
    yield Plan("adversarial-long", "adversarial", [topk, max(1, topk - 1), few], amplitude=3.0)
    yield Plan("adversarial-holes", "adversarial", [few, 3, 0], holes=True)
    yield Plan("adversarial-negative", "adversarial", [few, 3], "negative")
    yield Plan("adversarial-outlier", "adversarial", [few, 3], "outlier")
    yield Plan("adversarial-tiny", "adversarial", [few, 3], "tiny", tiny(definition))
    yield Plan("adversarial-ties", "adversarial", [few, 3], "ties")


def _indices(draw: Draw, valid: list[int], topk: int, pool: int, *, holes: bool) -> torch.Tensor:
    """int32 [T, topk]: `valid` distinct rows out of 1..pool-2 each, then -1, or -1 between them with `holes`.

    All tokens choose from the same max(valid) rows, so their lists overlap and the other rows belong to nobody.
    """
    most = max(valid, default=0)
    rows = draw.permutation("pool", most, out_of=pool - 2) + 1
    indices = torch.full((len(valid), topk), -1, dtype=torch.int32, device=draw.device)
    for token, count in enumerate(valid):
        chosen = draw.permutation(f"sparse_indices {token}", count, out_of=most)
        places = torch.arange(count, device=draw.device)
        if holes:
            places = draw.permutation(f"holes {token}", count, out_of=topk).sort().values
        indices[token, places] = rows[chosen].to(torch.int32)
    return indices
