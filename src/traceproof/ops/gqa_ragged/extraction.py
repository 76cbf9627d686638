"""Definitions of grouped-query attention over ragged keys and values."""

from traceproof.ops.common import attention_extraction as attention
from traceproof.ops.drafts import Draft, fill
from traceproof.ops.extraction import Extraction


def gqa_ragged(heads: int, kv_heads: int, dim: int) -> Draft:
    """Whole sequences, keys and values side by side; causal."""
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "qk_dim": dim, "vo_dim": dim}
    return Draft(
        name=f"gqa_ragged_prefill_causal_h{heads}_kv{kv_heads}_d{dim}",
        description="Batched grouped-query attention prefill over ragged inputs, causal.",
        axes=attention.heads_of(heads, kv_heads, dim) | attention.RAGGED_AXES,
        constraints=attention.RAGGED_CONSTRAINTS,
        inputs=attention.ragged("head_dim", "head_dim"),
        outputs=attention.outputs("total_q", "head_dim"),
        filled=fill(__package__, "ragged_prefill", **sizes),
        stage="prefill",
        fi_api=attention.RAGGED,
        tp=True,
    )


EXTRACTION = Extraction(drafts={"gqa": lambda call, _: [gqa_ragged(call["heads"], call["kv_heads"], call["dim"])]})
