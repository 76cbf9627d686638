"""Laws of rmsnorm_sigmoid_gate."""

from traceproof.ops.common.laws import BATCH, columns, negated
from traceproof.ops.laws import Law

LAWS = (*BATCH, Law("columns permuted", columns), Law("sign of x", negated("input"), exact=True))
