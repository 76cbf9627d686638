"""Answers of gemm."""

import torch

from traceproof.ops.answers import Answers
from traceproof.ops.base import TORCH_DTYPES, Tensors
from traceproof.ops.common.products import product_answers
from traceproof.ops.formula import Wide, by
from traceproof.ops.gemm.oracle import roles


def _factors(wide: Wide) -> tuple[torch.Tensor, torch.Tensor]:
    names = roles(wide.definition)
    return wide[names.a], wide[names.b].mT


def _low_sums(wide: Wide) -> Tensors:
    """Partial sums kept in the inputs' dtype, as a kernel without a wide accumulator would."""
    names = roles(wide.definition)
    a, b, dtype = wide[names.a], wide[names.b], TORCH_DTYPES[wide.definition.inputs[names.a].dtype]
    total = torch.zeros((len(a), len(b)), dtype=dtype)
    for x, y in zip(torch.split(a, 16, dim=1), torch.split(b, 16, dim=1), strict=True):
        total = (total.float() + x @ y.T).to(dtype)
    return {names.c: total}


def _untransposed(wide: Wide) -> Tensors:
    """B's memory read as [K, N]."""
    a, b = _factors(wide)
    return {roles(wide.definition).c: a @ b.mT.reshape(b.shape)}


RIGHT, WRONG = product_answers(lambda definition: roles(definition).c, _factors)
ANSWERS = Answers(
    RIGHT, (*WRONG[:4], by("B not transposed", _untransposed), by("sums in the inputs' dtype", _low_sums))
)
