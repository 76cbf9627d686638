"""Laws of batched products: C[.., M, N] = A[.., M, K] @ B[.., K, N]."""

from traceproof.ops.common.laws import BATCH, other_inputs, unchanged
from traceproof.ops.laws import Experiment, Law, Subject, permutation


def _k_permuted(subject: Subject) -> Experiment:
    a, b = subject.tensor("A"), subject.tensor("B")
    order = permutation(subject, a.shape[-1])
    return other_inputs(subject.with_inputs(A=a[..., order], B=b[..., order, :]), unchanged, unchanged)


def _n_permuted(subject: Subject) -> Experiment:
    order = permutation(subject, subject.tensor("B").shape[-1])
    moved = subject.with_inputs(B=subject.tensor("B")[..., order])
    return other_inputs(
        moved, unchanged, lambda outputs: {name: value[..., order] for name, value in outputs.items()}
    )


PRODUCT = (*BATCH, Law("K permuted", _k_permuted), Law("columns of B permuted", _n_permuted))
