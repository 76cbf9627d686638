"""gated_residual_rmsnorm: alpha * residual + beta * norm(branch * (weight + gain_center)), in float32."""

from traceproof.ops.base import Tensors
from traceproof.ops.common.formula import Form, FormulaOp, Wide
from traceproof.ops.common.norms import rms_norm


def gated(wide: Wide) -> Tensors:
    """The sum; the branch is weighted before its norm."""
    branch = wide["branch"]
    if "weight" in wide:
        branch = branch * (wide["weight"] + wide.number("gain_center"))
    normed = rms_norm(branch, wide.number("eps"))
    return {"output": wide["alpha"] * wide["residual"] + wide["beta"] * normed}


OP = FormulaOp(
    "gated_residual_rmsnorm",
    Form("branch[n h] residual[n h] weight[h]? alpha[h] beta[h] eps gain_center -> output[n h]", gated),
    scalars={"eps": 1e-6, "gain_center": 1.0},
    data=("branch",),
)
