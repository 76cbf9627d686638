"""Laws of layernorm."""

from traceproof.ops.common.laws import BATCH, columns, negated
from traceproof.ops.laws import Law

LAWS = (
    *BATCH,
    Law("columns permuted", columns),
    Law("sign of x and of the bias", negated("hidden_states", "bias"), exact=True),
)
