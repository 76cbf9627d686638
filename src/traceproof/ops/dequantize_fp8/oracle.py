"""dequantize_fp8: y = q * scale, fp8 values with a float32 scale per row and block of columns."""

import torch

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.base import Tensors, Value
from traceproof.ops.cases import Case
from traceproof.ops.common.quant import scale_blocks
from traceproof.ops.formula import Form, FormulaOp, Wide


def widened(wide: Wide) -> Tensors:
    """The values, scaled."""
    q, scale = wide["q"], wide["scale"]
    return {"y": scale_blocks(q, scale, height=1, width=q.shape[1] // scale.shape[1])}


class DequantizeFp8(FormulaOp):
    """Any fp8 value but NaN, and scales over powers of two."""

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """Codes of any bits; scales of 2^-9 to 2, times a number between 1 and 2."""
        shape = definition.shape_of(spec, case.axes) or ()
        if name == "q":
            return draw.bits(name, shape, torch.float8_e4m3fn)
        powers = draw.integers(f"{name}.power", shape, torch.int32, low=-9, high=1)
        scale = torch.ldexp(draw.uniform(name, shape, low=1.0, high=2.0), powers)
        return scale * float(case.params.get("scale", 1.0))


OP = DequantizeFp8(
    "dequantize_fp8",
    Form("q[n h] scale[n g] -> y[n h]", widened),
    adversarial={"tiny": {"scale": 2.0**-40}, "large": {"scale": 2.0**40}},
)
