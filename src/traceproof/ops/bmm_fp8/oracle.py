"""bmm_fp8: C[b m n] = (A[b m k] * A_scale) @ (B[b k n] * B_scale), fp8 matrices with one float32 scale each."""

import torch

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.base import Tensors, Value
from traceproof.ops.cases import Case
from traceproof.ops.common.products import bounded
from traceproof.ops.compare import Backward
from traceproof.ops.formula import Form, FormulaOp, Wide


def product(wide: Wide) -> Tensors:
    """The product of what the matrices stand for."""
    return bounded("C", wide["A"] * wide["A_scale"], wide["B"] * wide["B_scale"])


class BmmFp8(FormulaOp):
    """The scales are positive and unlike each other; a number that only names the output's dtype is not read."""

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """A scale is between 0.01 and 0.03, or twice that."""
        made = super().value(definition, name, spec, case, draw)
        if not name.endswith("_scale") or not isinstance(made, torch.Tensor):
            return made
        factor = 2.0 if name == "A_scale" else 1.0
        return draw.uniform(name, made.shape, low=0.01, high=0.03) * factor


OP = BmmFp8(
    "bmm_fp8",
    Form("A[b m k] B[b k n] A_scale[s] B_scale[s] dtype? -> C[b m n]", product),
    scalars={"dtype": 1},
    sizes={"m": (3, 1, 17, 8), "s": (1,)},
    adversarial={"tiny": {"scale": 2.0**-6}, "outlier": {"outlier": 300.0}, "offset": {"offset": 2.0}},
    data=("A",),
    gates={"C": Backward()},
)
