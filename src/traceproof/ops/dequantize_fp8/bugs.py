"""Answers of dequantize_fp8."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.formula import Wide, by

Scale = Callable[[torch.Tensor, int], torch.Tensor]  # scales [n g] and a block's width -> [n h]


def _spread(scale: torch.Tensor, width: int) -> torch.Tensor:
    return scale.repeat_interleave(width, 1)


def _answer(name: str, spread: Scale = _spread, *, dtype: torch.dtype = torch.float32) -> Answer:
    """The values times other scales, in a dtype."""

    def formula(wide: Wide) -> Tensors:
        q, scale = wide["q"], wide["scale"]
        return {"y": q.to(dtype) * spread(scale, q.shape[1] // scale.shape[1]).to(dtype)}

    return by(name, formula)


def _as_whole_numbers(wide: Wide) -> Tensors:
    q = wide.values["q"]
    assert isinstance(q, torch.Tensor)
    scale = wide["scale"]
    return {"y": q.view(torch.int8).float() * _spread(scale, q.shape[1] // scale.shape[1])}


ANSWERS = Answers(
    right=(_answer("float32, rounded once"), _answer("float64, rounded once", dtype=torch.float64)),
    wrong=(
        _answer("scale dropped", lambda scale, width: torch.ones_like(_spread(scale, width))),
        _answer("divided by the scale", lambda scale, width: 1 / _spread(scale, width)),
        _answer(
            "one block's scale for the row", lambda scale, width: scale[:, :1].expand(-1, width * scale.shape[1])
        ),
        _answer("blocks of neighbours", lambda scale, width: scale.repeat(1, width)),
        _answer("blocks in the opposite order", lambda scale, width: _spread(scale.flip(1), width)),
        _answer(
            "scale rounded to a power of two",
            lambda scale, width: torch.exp2(_spread(scale, width).log2().round()),
        ),
        _answer("scale in fp8", lambda scale, width: _spread(scale.to(torch.float8_e4m3fn).float(), width)),
        by("codes read as whole numbers", _as_whole_numbers),
    ),
)
