"""dsa_paged: DeepSeek's sparse attention, attention over given token indices and the top-k indexer."""

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Op
from traceproof.ops.dsa_paged.indexer import TopkIndexer
from traceproof.ops.dsa_paged.sparse import SparseAttention

INDEXER = TopkIndexer()


class DsaPaged(SparseAttention):
    """Attention over given indices; the indexer that gives them is another form."""

    def of_form(self, definition: Definition) -> Op:
        """Told by whether it takes `sparse_indices`."""
        return self if "sparse_indices" in definition.inputs else INDEXER


OP = DsaPaged()
