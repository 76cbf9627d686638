"""Which laws hold for a definition."""

from __future__ import annotations

from traceproof.dataset.definition import Definition
from traceproof.metamorphic import attention, discrete, moe, recurrent, rows
from traceproof.metamorphic.model import Law

BY_OP_TYPE: dict[str, tuple[Law, ...]] = {
    "dsa_paged": attention.LAWS,
    "gdn": recurrent.GDN,
    "gemm": rows.GEMM,
    "gqa_paged": attention.LAWS,
    "gqa_ragged": attention.LAWS,
    "mamba_ssu": recurrent.MAMBA,
    "mla_paged": attention.LAWS,
    "mla_ragged": attention.LAWS,
    "moe": moe.LAWS,
    "rmsnorm": rows.NORM,
    "rope": rows.ROPE,
    "sampling": discrete.SAMPLING,
}


def laws_of(definition: Definition) -> tuple[Law, ...]:
    """The laws of a definition; some may say nothing about any of its cases."""
    if "k_index_cache_fp8" in definition.inputs:
        return discrete.INDEXER
    return BY_OP_TYPE.get(definition.op_type, ())
