"""Sparse attention: each token attends to the cache rows that its list of indices names, absorbed MLA otherwise.

An index is page * page_size + offset, that is a row of the flattened cache; -1 names nothing. There is no causal
mask: who made the list has seen to that. A token whose list is all -1 gives 0 and -inf.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, HostDraw
from traceproof.ops.adapter import dim
from traceproof.ops.attention import GATES, attention, unfit
from traceproof.ops.attention_inputs import Sequences, drawn, starts, tiny
from traceproof.ops.base import Op, Tensors, Unsupported, Values, ordered, rounded, specified
from traceproof.ops.cases import Case
from traceproof.ops.compare import Comparison
from traceproof.ops.formula import Form, Wide

FORM = Form(
    "q_nope[t h c] q_pe[t h r] ckv_cache[p s c] kpe_cache[p s r] sparse_indices[t k] sm_scale"
    " -> output[t h c] lse[t h]",
    attention,
)
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


class SparseAttention(Op):
    """The form with `sparse_indices`."""

    op_type = "dsa_paged"

    def check(self, definition: Definition) -> None:
        """Known: queries [T, H, D], caches [pages, page_size, D], sparse_indices [T, topk], sm_scale."""
        problem = FORM.misfit(definition) or unfit(definition)
        const_size(definition, "sparse_indices", 1)
        const_size(definition, "ckv_cache", 1)
        if problem is not None:
            raise Unsupported(problem)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float64."""
        exact = attention(Wide(definition, inputs, torch.float64))
        return {name: exact[name] for name in definition.outputs}

    def baseline(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula with float32 sums and softmax weights in the inputs' dtype."""
        return rounded(definition, attention(Wide(definition, inputs, torch.float32)))

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Close, both."""
        return {name: GATES[name] for name in definition.outputs}

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
        shapes, _ = specified(definition, case, definition.inputs)
        (pages, page_size, _), valid = shapes["ckv_cache"], list(case.params["valid"])
        topk = shapes["sparse_indices"][1]
        indices = _indices(draw, valid, topk, pages * page_size, holes=bool(case.params["holes"]))
        rows = indices[indices >= 0].to(torch.int64)
        data = drawn(definition, case, draw, Sequences(rows, starts(valid)[:-1], valid, valid, 1))
        return ordered(definition, {**data, "sparse_indices": indices})

    def memory(self, definition: Definition, case: Case) -> int:
        """Caches and queries as stored and in float32, and one token's gathered keys, in float64 four times."""
        topk = const_size(definition, "sparse_indices", 1)
        width = sum(const_size(definition, name, -1) for name in ("q_nope", "q_pe"))
        return super().memory(definition, case) + 4 * 8 * topk * width


def const_size(definition: Definition, name: str, axis: int) -> int:
    """The const size of an axis of an input. Raises Unsupported: the axis is var."""
    size = dim(definition, name, axis)
    if size is None:
        raise Unsupported(f"axis {axis} of {name} is var, known is const")
    return size


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
