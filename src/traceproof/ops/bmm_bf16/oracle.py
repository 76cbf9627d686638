"""bmm_bf16: C[b m n] = A[b m k] @ B[b k n], bfloat16 matrices."""

from traceproof.ops.common.products import bounded
from traceproof.ops.compare import Backward
from traceproof.ops.formula import Form, FormulaOp

OP = FormulaOp(
    "bmm_bf16",
    Form("A[b m k] B[b k n] -> C[b m n]", lambda wide: bounded("C", wide["A"], wide["B"])),
    sizes={"m": (3, 1, 17, 8)},
    data=("A",),
    gates={"C": Backward()},
)
