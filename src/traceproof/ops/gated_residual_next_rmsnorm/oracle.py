"""gated_residual_next_rmsnorm: alpha * residual + beta * norm(branch), and the next layer's norm of that sum."""

import torch

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.base import Tensors, Value
from traceproof.ops.cases import Case
from traceproof.ops.common.formula import Form, FormulaOp, Wide
from traceproof.ops.common.norms import rms_norm


def gated(wide: Wide) -> Tensors:
    """Both outputs; the branch is weighted before its norm, the sum after."""
    branch = wide["branch"]
    if "post_weight" in wide:
        branch = branch * (wide["post_weight"] + wide.number("post_gain_center", 0.0))
    total = wide["alpha"] * wide["residual"] + wide["beta"] * rms_norm(branch, wide.number("post_eps"))
    gain = wide["next_weight"] + wide.number("next_gain_center")
    return {"residual_out": total, "ffn_input": rms_norm(total, wide.number("next_eps")) * gain}


class GatedResidual(FormulaOp):
    """Beside the usual cases one whose gains are so small that the second eps shows."""

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """In the case `faint` the gains are that much smaller."""
        made = super().value(definition, name, spec, case, draw)
        faint = name in {"alpha", "beta"} and isinstance(made, torch.Tensor)
        return made * float(case.params.get("faint", 1.0)) if faint else made  # type: ignore[operator]


OP = GatedResidual(
    "gated_residual_next_rmsnorm",
    Form(
        "branch[n h] residual[n h] next_weight[h] post_weight[h]? alpha[h] beta[h] post_eps next_eps"
        " next_gain_center post_gain_center? -> residual_out[n h] ffn_input[n h]",
        gated,
    ),
    scalars={"post_eps": 1e-6, "next_eps": 1e-5, "next_gain_center": 1.0, "post_gain_center": 0.5},
    adversarial={
        "tiny": {"scale": 1e-3},
        "outlier": {"outlier": 300.0},
        "offset": {"offset": 2.0},
        "faint": {"faint": 2e-3},
    },
    data=("branch",),
)
