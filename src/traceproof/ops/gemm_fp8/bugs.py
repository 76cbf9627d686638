"""Answers of gemm_fp8."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.common.products import product_answers
from traceproof.ops.formula import Wide, by
from traceproof.ops.gemm_fp8.oracle import factors

Scales = Callable[[torch.Tensor], torch.Tensor]


def _same(scale: torch.Tensor) -> torch.Tensor:
    return scale


def _scaled(name: str, a: Scales = _same, b: Scales = _same) -> Answer:
    """The product with other scales."""

    def formula(wide: Wide) -> Tensors:
        left, right = factors(wide.changed(a_scale=a(wide["a_scale"]), b_scale=b(wide["b_scale"])))
        return {"out": left @ right}

    return by(name, formula)


def _per_block(wide: Wide) -> Tensors:
    """Each block's product scaled after it is summed, as kernels do."""
    a, b, a_scale, b_scale = wide["a"], wide["b"], wide["a_scale"], wide["b_scale"]
    width = a.shape[1] // a_scale.shape[1]
    columns = b_scale.repeat_interleave(b.shape[0] // b_scale.shape[0], 0)
    total = torch.zeros((len(a), len(b)))
    for block in range(a_scale.shape[1]):
        part = slice(block * width, (block + 1) * width)
        total += (a[:, part] @ b[:, part].T) * a_scale[:, block, None] * columns[None, :, block]
    return {"out": total}


RIGHT, WRONG = product_answers("out", factors)
ANSWERS = Answers(
    (*RIGHT, by("scaled after each block", _per_block)),
    (
        *WRONG,
        _scaled("scales of a dropped", a=torch.ones_like),
        _scaled("scales of b dropped", b=torch.ones_like),
        _scaled("scales of a inverted", a=torch.reciprocal),
        _scaled("the first block's scale of a for all", a=lambda scale: scale[:, :1].expand(scale.shape)),
        _scaled("blocks of b along K exchanged", b=lambda scale: scale.flip(1)),
        _scaled("blocks of b along N exchanged", b=lambda scale: scale.flip(0)),
        _scaled("scales of b transposed", b=lambda scale: scale.T.reshape(scale.shape)),
    ),
)
