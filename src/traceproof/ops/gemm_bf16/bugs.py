"""Answers of gemm_bf16."""

import torch

from traceproof.ops.answers import Answers, Tensors
from traceproof.ops.common.products import product_answers
from traceproof.ops.formula import Wide, by


def _biased(wide: Wide, product: torch.Tensor) -> torch.Tensor:
    return product + wide["bias"] if "bias" in wide else product


def _without_bias(wide: Wide) -> Tensors | None:
    return {"C": wide["A"] @ wide["B"]} if "bias" in wide else None


RIGHT, WRONG = product_answers("C", lambda wide: (wide["A"], wide["B"]), _biased)
ANSWERS = Answers(RIGHT, (*WRONG, by("bias dropped", _without_bias)))
