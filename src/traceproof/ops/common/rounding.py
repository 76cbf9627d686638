"""Quantisation of rows by a scale per block: what two op_types with other codes share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.common.formula import ADVERSARIAL, Form, FormulaOp, Wide, by
from traceproof.ops.compare import Close

FORM = "x[n h] -> q[n h] scale[n g]"
REASON = "right kernels differ where a value lies midway between two codes; cutting off errs twice as much"
ROUNDINGS = {
    "scale": 4.0
}  # of the largest value over that of the format: a quotient, or a reciprocal and a product
Scaled = Callable[[torch.Tensor], torch.Tensor]  # [n g b] -> [n g 1]
Over = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # values and their scales
Code = Callable[[torch.Tensor], torch.Tensor]  # values to those of the format


def in_blocks(wide: Wide) -> torch.Tensor:
    """The rows in as many blocks as the scales say, [n g b]."""
    x, spec = wide["x"], wide.definition.outputs["scale"]
    assert spec.shape is not None
    blocks = wide.definition.const_axes[spec.shape[1]]
    return x.reshape(len(x), blocks, x.shape[1] // blocks)


def quantised(wide: Wide, largest: float) -> Tensors:
    """Values over the scale that brings each block's largest to that of the format, and the scales."""
    blocks = in_blocks(wide)
    scale = blocks.abs().amax(-1, keepdim=True) / largest
    return {"q": (blocks / scale).reshape(wide["x"].shape), "scale": scale.squeeze(-1)}


def quantising_op(op_type: str, largest: float, codes: Close) -> FormulaOp:
    """The op of quantising to codes up to `largest`, which are judged so."""
    form = Form(FORM, lambda wide: quantised(wide, largest))
    return FormulaOp(
        op_type, form, adversarial=ADVERSARIAL, gates={"q": codes, "scale": Close()}, roundings=ROUNDINGS
    )


@dataclass(frozen=True, slots=True)
class Quantiser:
    """A format to quantise to."""

    largest: float  # value of the format
    to_code: Code  # rounds to its codes, in float32
    cut: Code  # takes the next code toward zero

    def exact(self, blocks: torch.Tensor) -> torch.Tensor:
        """The scales that the op asks for."""
        return _peak(blocks) / self.largest

    def whole(self, blocks: torch.Tensor) -> torch.Tensor:
        """One scale for all blocks."""
        scale = self.exact(blocks)
        return scale.amax().expand(scale.shape) if scale.numel() else scale

    def by_row(self, blocks: torch.Tensor) -> torch.Tensor:
        """One scale for the blocks of a row."""
        return self.exact(blocks).amax(1, keepdim=True).expand(-1, blocks.shape[1], 1)

    def way(self, name: str, scaled: Scaled, *, over: Over = torch.div, code: Code | None = None) -> Answer:
        """A way of quantising: by these scales, values over them, rounded so."""

        def formula(wide: Wide) -> Tensors:
            blocks = in_blocks(wide)
            scale = scaled(blocks)
            values = (code or self.to_code)(over(blocks, scale).clamp(-self.largest, self.largest))
            return {"q": values.reshape(wide["x"].shape), "scale": scale.expand(*blocks.shape[:2], 1).squeeze(-1)}

        return by(name, formula)

    def answers(self) -> Answers:
        """Right and wrong ways of quantising."""
        way, exact, largest = self.way, self.exact, self.largest
        return Answers(
            right=(
                way("a quotient", exact),
                way("times a reciprocal", exact, over=lambda blocks, scale: blocks * (1 / scale)),
                way("largest value times a reciprocal", lambda blocks: _peak(blocks) * (1 / largest)),
            ),
            wrong=(
                way("one scale per row", self.by_row),
                way("one scale for all", self.whole),
                way(
                    "scale without a sign's absolute value",
                    lambda blocks: blocks.amax(-1, keepdim=True).abs() / largest,
                ),
                way("scale of the mean", lambda blocks: blocks.abs().mean(-1, keepdim=True) / largest),
                way("scale inverted", lambda blocks: 1 / exact(blocks)),
                way("scale 2 per cent too large", lambda blocks: exact(blocks) * 1.02),
                way("scale half as large", lambda blocks: exact(blocks) / 2),
                way("scale in bfloat16", lambda blocks: exact(blocks).bfloat16().float()),
                way("times the scale", exact, over=torch.mul),
                way("blocks' scales shifted", lambda blocks: exact(blocks).roll(1, 1)),
                way("cut off", exact, code=self.cut),
            ),
        )


def _peak(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax(-1, keepdim=True)
