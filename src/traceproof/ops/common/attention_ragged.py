"""Causal attention over ragged keys and values: gqa_ragged and mla_ragged differ only in their head counts."""

from collections.abc import Mapping

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Values, ordered, scalar, specified, tensor
from traceproof.ops.cases import Case
from traceproof.ops.common.attention import Operands, require, require_ratio, scale_by
from traceproof.ops.common.attention_cases import Plan
from traceproof.ops.common.attention_inputs import Style, lean
from traceproof.ops.common.attention_op import AttentionOp
from traceproof.ops.common.paging import ragged_layout, read_spans

RANKS = {"q": 3, "k": 3, "v": 3, "qo_indptr": 1, "kv_indptr": 1, "sm_scale": None}


class RaggedAttention(AttentionOp):
    """Prefill over rows laid end to end; any head ratio, any head sizes, sm_scale 1 / sqrt(size of a key)."""

    def check(self, definition: Definition) -> None:
        """Known: q [T, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv], both indptr, sm_scale."""
        require(definition, RANKS)
        require_ratio(definition, "k", "v")

    def page_size(self, definition: Definition) -> int:
        """No pages."""
        del definition
        return 1

    def axes(self, definition: Definition, plan: Plan) -> Mapping[str, int]:
        """total_q, total_kv, len_indptr, whatever they are called."""
        sizes = {
            "q": sum(plan.q_lens or ()),
            "k": sum(plan.kv_lens),
            "qo_indptr": len(plan.kv_lens) + 1,
            "kv_indptr": len(plan.kv_lens) + 1,
        }
        by_axis = {(definition.inputs[name].shape or ())[0]: size for name, size in sizes.items()}
        return {name: by_axis[name] for name in definition.var_axes}

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Data in the case's style; nothing is padded, so there is no room for poison."""
        shapes, dtypes = specified(definition, case, ("q", "k", "v"))
        heads, width = shapes["q"][1:]
        scale = scale_by(width)
        style = Style.of(case, width=width, scale=scale)
        layout = ragged_layout(case)
        k = style.keys(draw, "k", shapes["k"], dtypes["k"], outlier=True)
        q = style.tensor(draw, "q", shapes["q"], dtypes["q"])
        leaning = lean(draw, style, layout.sequences(draw.device, causal=True), heads=heads)
        q = leaning.added(q, k) if leaning else q
        values = layout.structure(definition, case, draw.device)
        values.update(q=q, k=k, v=style.values(draw, "v", shapes["v"], dtypes["v"]), sm_scale=scale)
        return ordered(definition, values)

    def operands(self, definition: Definition, inputs: Values) -> Operands:
        """The tensors as they are."""
        del definition
        q, k, v = (tensor(inputs, name) for name in ("q", "k", "v"))
        return Operands(q, k, v, read_spans(inputs, page_size=1), scalar(inputs, "sm_scale"))
