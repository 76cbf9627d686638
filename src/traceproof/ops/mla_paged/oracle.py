"""mla_paged: multi-head latent attention over a paged compressed cache, absorbed form, decode and prefill."""

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Unsupported, Values, ordered, scalar, specified, tensor
from traceproof.ops.cases import Case
from traceproof.ops.common import mla
from traceproof.ops.common.attention import Operands, const_size, require
from traceproof.ops.common.attention_op import PagedAttention
from traceproof.ops.common.paging import TABLE_RANKS, check_paged, paged_layout, read_spans, unread

RANKS = {"q_nope": 3, "q_pe": 3, "ckv_cache": 3, "kpe_cache": 3, **TABLE_RANKS}


class MlaPaged(PagedAttention):
    """Logits q_nope . ckv + q_pe . kpe, values ckv: the output stays in the compressed space."""

    op_type = "mla_paged"
    query, cache = "q_nope", "ckv_cache"

    def check(self, definition: Definition) -> None:
        """Known: queries [T, H, Dckv] and [T, H, Dkpe], caches [pages, page_size, Dckv] and [.., Dkpe]."""
        require(definition, RANKS, optional=("qo_indptr", "kv_last_page_len"))
        mla.require_widths(definition)
        if const_size(definition, "q_nope", 1) != const_size(definition, "q_pe", 1):
            raise Unsupported("q_nope and q_pe differ in their number of heads")
        check_paged(definition, caches=("ckv_cache", "kpe_cache"))

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Data in the case's style over a permuted page table; rows that nobody may read hold poison."""
        shapes, dtypes = specified(definition, case, mla.DRAWN)
        kpe_width = shapes["kpe_cache"][-1]
        style = mla.style_of(case, ckv=shapes["ckv_cache"][-1], kpe=kpe_width)
        layout = paged_layout(case, draw, page_size=self.page_size(definition))
        data = mla.drawn(draw, style, shapes, dtypes)
        ckv, kpe = data["ckv_cache"].flatten(0, 1), data["kpe_cache"].flatten(0, 1)
        sequences = layout.sequences(draw.device, causal="qo_indptr" in definition.inputs)
        mla.poison_(ckv, unread(sequences.rows, data["ckv_cache"]))
        data["q_nope"], data["q_pe"] = mla.queries(
            draw, style, nope=data["q_nope"], pe=data["q_pe"], ckv=ckv, kpe=kpe, sequences=sequences
        )
        values = layout.structure(definition, case, draw.device)
        return ordered(definition, {**values, **data, "sm_scale": mla.sm_scale(kpe_width)})

    def operands(self, definition: Definition, inputs: Values) -> Operands:
        """Both parts side by side, one key head."""
        del definition
        ckv, kpe = tensor(inputs, "ckv_cache"), tensor(inputs, "kpe_cache")
        q = torch.cat([tensor(inputs, "q_nope"), tensor(inputs, "q_pe")], -1)
        k, v = mla.keys(ckv.flatten(0, 1), kpe.flatten(0, 1))
        return Operands(q, k, v, read_spans(inputs, page_size=ckv.shape[1]), scalar(inputs, "sm_scale"))


OP = MlaPaged()
