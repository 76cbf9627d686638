"""gemm_fp8: out[m n] = (a * a_scale) @ (b * b_scale).T, a scaled per row and block of K, b per block of both."""

import torch

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.base import Tensors, Value
from traceproof.ops.cases import Case
from traceproof.ops.common.products import bounded
from traceproof.ops.common.quant import scale_blocks
from traceproof.ops.compare import Backward
from traceproof.ops.formula import Form, FormulaOp, Wide


def factors(wide: Wide) -> tuple[torch.Tensor, torch.Tensor]:
    """What the two matrices stand for, [m k] and [k n]."""
    a, b, b_scale = wide["a"], wide["b"], wide["b_scale"]
    width = b.shape[1] // b_scale.shape[1]
    left = scale_blocks(a, wide["a_scale"], height=1, width=width)
    return left, scale_blocks(b, b_scale, height=b.shape[0] // b_scale.shape[0], width=width).T


def product(wide: Wide) -> Tensors:
    """The product."""
    return bounded("out", *factors(wide))


class GemmFp8(FormulaOp):
    """Scales spread over powers of two, so that blocks which are confused show."""

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """A scale is 1/64 to 1/8, a power of two times a number between 1 and 2."""
        made = super().value(definition, name, spec, case, draw)
        if not name.endswith("_scale") or not isinstance(made, torch.Tensor):
            return made
        powers = draw.integers(f"{name}.power", made.shape, torch.int32, low=-6, high=-3)
        return torch.ldexp(draw.uniform(name, made.shape, low=1.0, high=2.0), powers)


OP = GemmFp8(
    "gemm_fp8",
    Form("a[m k] b[n k] a_scale[m x] b_scale[y x] -> out[m n]", product),
    adversarial={"tiny": {"scale": 2.0**-6}, "outlier": {"outlier": 300.0}, "offset": {"offset": 2.0}},
    data=("a",),
    gates={"out": Backward()},
)
