"""DeepSeek sparse attention over a paged cache, and the indexer that chooses its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceproof.ops.record import OpType

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition


def _indexer(definition: Definition) -> bool:
    """Whether it returns nothing but indices: that call is DeepGEMM's."""
    return all(spec.dtype == "int32" for spec in definition.outputs.values())


OP = OpType(family="dsa", staged=True, without_api=_indexer)
