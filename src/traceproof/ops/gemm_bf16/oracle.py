"""gemm_bf16: C[m n] = A[m k] @ B[k n] (+ bias[n] in the wide sum), bfloat16 matrices, B not transposed."""

from traceproof.ops.base import Tensors
from traceproof.ops.common.products import bounded
from traceproof.ops.compare import Backward
from traceproof.ops.formula import Form, FormulaOp, Wide


def product(wide: Wide) -> Tensors:
    """The product, and the bias added."""
    found = bounded("C", wide["A"], wide["B"])
    if "bias" in wide:
        found["C"] = found["C"] + wide["bias"]
        found["C@bound"] = found["C@bound"] + wide["bias"].abs() * 2.0**-23
    return found


OP = FormulaOp(
    "gemm_bf16", Form("A[m k] B[k n] bias[n]? -> C[m n]", product), data=("A",), gates={"C": Backward()}
)
