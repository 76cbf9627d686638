"""Laws of gemm_bf16."""

import torch

from traceproof.ops.common.laws import BATCH, other_inputs, scaled, times, unchanged
from traceproof.ops.laws import Experiment, Law, Subject, permutation


def _k_permuted(subject: Subject) -> Experiment:
    a, b = subject.tensor("A"), subject.tensor("B")
    order = permutation(subject, a.shape[-1])
    return other_inputs(subject.with_inputs(A=a[..., order], B=b[..., order, :]), unchanged, unchanged)


def _bias(subject: Subject, order: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"bias": subject.tensor("bias")[order]} if "bias" in subject.inputs else {}


def _n_permuted(subject: Subject) -> Experiment:
    order = permutation(subject, subject.tensor("B").shape[-1])
    moved = subject.with_inputs(B=subject.tensor("B")[..., order], **_bias(subject, order))
    return other_inputs(
        moved, unchanged, lambda outputs: {name: value[..., order] for name, value in outputs.items()}
    )


LAWS = (
    *BATCH,
    Law("K permuted", _k_permuted),
    Law("columns of B permuted", _n_permuted),
    Law(
        "A doubled",
        scaled("A", output=times(0.5, "C")),
        exact=True,
        holds=lambda definition: "bias" not in definition.inputs,
    ),
)
