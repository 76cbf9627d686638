"""Laws of products: C[.., M, N] = A[.., M, K] @ B[.., K, N], and a bias [N]."""

from traceproof.ops.common.laws import BATCH, permuted
from traceproof.ops.laws import Law

PRODUCT = (
    *BATCH,
    Law("K permuted", permuted({"A": -1, "B": -2})),
    Law("columns of B permuted", permuted({"B": -1, "bias": 0}, -1)),
)
