"""rmsnorm_sigmoid_gate: x / sqrt(mean(x^2) + eps) * sigmoid(gate) over the last axis of [tokens, heads, dim]."""

from traceproof.ops.base import Tensors
from traceproof.ops.common.formula import Form, FormulaOp, Wide
from traceproof.ops.common.gates import sigmoid
from traceproof.ops.common.norms import rms_norm


def gated(wide: Wide) -> Tensors:
    """The normed rows, gated."""
    return {"output": rms_norm(wide["input"], wide.number("eps")) * sigmoid(wide["gate"])}


OP = FormulaOp(
    "rmsnorm_sigmoid_gate", Form("input[n t h] gate[n t h] eps -> output[n t h]", gated), scalars={"eps": 1e-5}
)
