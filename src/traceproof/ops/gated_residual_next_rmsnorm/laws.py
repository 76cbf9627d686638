"""Laws of gated_residual_next_rmsnorm."""

from traceproof.ops.common.laws import BATCH, columns, negated
from traceproof.ops.laws import Law

LAWS = (*BATCH, Law("columns permuted", columns), Law("signs", negated("branch", "residual"), exact=True))
