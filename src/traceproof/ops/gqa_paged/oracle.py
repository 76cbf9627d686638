"""gqa_paged: grouped-query attention over a paged cache, decode and causal prefill."""

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Values, ordered, scalar, specified, tensor
from traceproof.ops.cases import Case
from traceproof.ops.common.attention import Operands, require, require_ratio, scale_by
from traceproof.ops.common.attention_inputs import POISON, Style, lean
from traceproof.ops.common.attention_op import PagedAttention
from traceproof.ops.common.paging import TABLE_RANKS, check_paged, paged_layout, read_spans, unread

RANKS = {"q": 3, "k_cache": 4, "v_cache": 4, **TABLE_RANKS}


class GqaPaged(PagedAttention):
    """Decode without qo_indptr, causal prefill with it; sm_scale 1 / sqrt(head_dim); NHD cache layout."""

    op_type = "gqa_paged"
    query, cache = "q", "k_cache"

    def check(self, definition: Definition) -> None:
        """Known: q [T, Hq, D], caches [pages, page_size, Hkv, D or Dv], kv_last_page_len unless page_size is 1."""
        require(definition, RANKS, optional=("qo_indptr", "kv_last_page_len"))
        require_ratio(definition, "k_cache", "v_cache")
        check_paged(definition, caches=("k_cache", "v_cache"))

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Data in the case's style over a permuted page table; rows that nobody may read hold poison."""
        shapes, dtypes = specified(definition, case, ("q", "k_cache", "v_cache"))
        heads, width = shapes["q"][1:]
        scale = scale_by(width)
        style = Style.of(case, width=width, scale=scale)
        layout = paged_layout(case, draw, page_size=self.page_size(definition))
        k = style.keys(draw, "k_cache", shapes["k_cache"], dtypes["k_cache"], outlier=True)
        v = style.values(draw, "v_cache", shapes["v_cache"], dtypes["v_cache"])
        q = style.tensor(draw, "q", shapes["q"], dtypes["q"])
        sequences = layout.sequences(draw.device, causal="qo_indptr" in definition.inputs)
        v.flatten(0, 1)[unread(sequences.rows, v)] = POISON
        leaning = lean(draw, style, sequences, heads=heads)
        q = leaning.added(q, k.flatten(0, 1)) if leaning else q
        values = layout.structure(definition, case, draw.device)
        values.update(q=q, k_cache=k, v_cache=v, sm_scale=scale)
        return ordered(definition, values)

    def operands(self, definition: Definition, inputs: Values) -> Operands:
        """The caches flattened to tokens."""
        del definition
        q, k, v = (tensor(inputs, name) for name in ("q", "k_cache", "v_cache"))
        spans = read_spans(inputs, page_size=k.shape[1])
        return Operands(q, k.flatten(0, 1), v.flatten(0, 1), spans, scalar(inputs, "sm_scale"))


OP = GqaPaged()
