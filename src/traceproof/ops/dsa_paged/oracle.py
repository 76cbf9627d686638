"""dsa_paged: DeepSeek's sparse attention, attention over given token indices and the top-k indexer."""

from collections.abc import Iterable, Mapping, Sequence

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Op, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.common.attention import Operands
from traceproof.ops.compare import Comparison
from traceproof.ops.dsa_paged.indexer import TopkIndexer
from traceproof.ops.dsa_paged.sparse import SparseAttention


class DsaPaged(Op):
    """Hands each definition to its form, told by whether it takes `sparse_indices`."""

    op_type = "dsa_paged"

    def __init__(self) -> None:
        self._sparse = SparseAttention()
        self._indexer = TopkIndexer()

    def _form(self, definition: Definition) -> Op:
        return self._sparse if "sparse_indices" in definition.inputs else self._indexer

    def check(self, definition: Definition) -> None:
        """As the form."""
        self._form(definition).check(definition)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """As the form."""
        return self._form(definition).cases(definition, sizes=sizes, seed=seed)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """As the form."""
        return self._form(definition).inputs(definition, case, draw)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """As the form."""
        return self._form(definition).oracle(definition, inputs)

    def floor(self, definition: Definition, inputs: Values) -> Tensors:
        """As the form."""
        return self._form(definition).floor(definition, inputs)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """As the form."""
        return self._form(definition).comparisons(definition)

    def operands(self, definition: Definition, inputs: Values) -> Operands:
        """Those of sparse attention."""
        return self._sparse.operands(definition, inputs)

    def memory(self, definition: Definition, case: Case) -> int:
        """As the form."""
        return self._form(definition).memory(definition, case)


OP = DsaPaged()
