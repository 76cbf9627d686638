"""What the four batched attention ops share; each adds the names of its tensors and how they are drawn."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Op, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.common.attention import MAX_LOGITS, Operands, baseline, comparisons, const_size, oracle
from traceproof.ops.common.attention_cases import Plan, Planner
from traceproof.ops.common.paging import paged_axes
from traceproof.ops.compare import Comparison
from traceproof.ops.far import Far

SOFTMAX_COPIES = 4  # logits, masked logits, probabilities and one temporary, as a reference in float32 holds them


class AttentionFormula(Op):
    """An op whose oracle and baseline are those of attention over its operands."""

    @abstractmethod
    def operands(self, definition: Definition, inputs: Values) -> Operands:
        """The inputs as queries, flattened keys and values, and spans."""

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float64, sequence by sequence."""
        return oracle(definition, self.operands(definition, inputs))

    def baseline(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula with float32 sums and softmax weights in the inputs' dtype."""
        return baseline(definition, self.operands(definition, inputs))

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Close, both."""
        return comparisons(definition)


class AttentionOp(AttentionFormula):
    """Attention over a batch of sequences: softmax(q k^T * sm_scale) v, and the base-2 log-sum-exp of the logits.

    With a qo_indptr a sequence has several queries and a causal mask aligned to its end (the last query sees all);
    without, one query that sees all. Queries that see no key, q_len > kv_len among them, give 0 and -inf.
    """

    @abstractmethod
    def page_size(self, definition: Definition) -> int:
        """Tokens a page; 1 where there are no pages."""

    @abstractmethod
    def axes(self, definition: Definition, plan: Plan) -> Mapping[str, int]:
        """Sizes of the definition's var axes for a plan."""

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's sizes, boundary lengths, empty rows, and the adversarial pack."""
        for plan in self._planner(definition, seed).plans(sizes):
            yield Case(plan.id, plan.size, self.axes(definition, plan), seed, plan.params())

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """See `Planner.stress`."""
        enlarged = self.enlarged(definition)
        pages = 0 if enlarged is None else enlarged.size(definition, 1)
        for plan in self._planner(definition, seed).stress(pages):
            yield Case(plan.id, plan.size, self.axes(definition, plan), seed, plan.params())

    def _planner(self, definition: Definition, seed: int) -> Planner:
        return Planner(definition, seed, self.page_size(definition), "qo_indptr" in definition.inputs)

    def memory(self, definition: Definition, case: Case) -> int:
        """Inputs as stored and once in float32, and the longest sequence with its logits.

        A reference may expand the key heads to the query heads and hold the logits of a whole sequence; the oracle
        holds one sequence in float64 and a bounded number of logits.
        """
        specs = [*definition.inputs.values(), *definition.outputs.values()]
        elements = [(math.prod(definition.shape_of(spec, case.axes) or ()), spec.dtype.bits) for spec in specs]
        stored = sum(count * (bits + 32) // 8 for count, bits in elements)
        query = next(iter(definition.inputs.values()))
        rows, heads, *_ = definition.shape_of(query, case.axes) or (0, 0)
        kv_len, pairs = self._longest(definition, case, rows)
        width = sum(definition.const_axes.get((spec.shape or ("",))[-1], 0) for spec in definition.inputs.values())
        sequence = kv_len * heads * width * 8
        return stored + sequence + pairs * heads * 4 * SOFTMAX_COPIES + SOFTMAX_COPIES * 8 * MAX_LOGITS

    def _longest(self, definition: Definition, case: Case, rows: int) -> tuple[int, int]:
        """Longest key sequence and largest q_len * kv_len; for a workload line, of sequences of equal length."""
        if "kv_lens" in case.params:
            kv_lens = list(case.params["kv_lens"])
            q_lens = list(case.params.get("q_lens", [1] * len(kv_lens)))
        else:
            sizes = {**definition.const_axes, **case.axes}
            batch = max(1, sizes[(definition.inputs["kv_indptr"].shape or ())[0]] - 1)
            units = definition.inputs["kv_indices" if "kv_indices" in definition.inputs else "k"].shape or ()
            kv_lens = [-(-sizes[units[0]] * self.page_size(definition) // batch)]
            q_lens = [-(-rows // batch)]
        pairs = [query * length for query, length in zip(q_lens, kv_lens, strict=True)]
        return max(kv_lens, default=0), max(pairs, default=0)


class PagedAttention(AttentionOp):
    """Attention over pages."""

    query: str  # the input whose rows are queries
    cache: str  # the input [pages, page_size, ...] whose pages are counted

    def page_size(self, definition: Definition) -> int:
        """Tokens a page."""
        return const_size(definition, self.cache, 1)

    def enlarged(self, definition: Definition) -> Far:
        """The cache."""
        return Far(axis=(definition.inputs[self.cache].shape or ())[0], slots=("kv_indices",), copies=1)

    def axes(self, definition: Definition, plan: Plan) -> Mapping[str, int]:
        """All var axes, told by where they stand."""
        size = self.page_size(definition)
        return paged_axes(definition, plan, query=self.query, cache=self.cache, page_size=size)
