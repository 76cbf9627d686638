"""layernorm: y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis, plain or in fp8 by one scale."""

import torch

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.base import TORCH_DTYPES, Tensors, Value
from traceproof.ops.cases import Case
from traceproof.ops.common.formula import ADVERSARIAL, Form, FormulaOp, Wide
from traceproof.ops.common.quant import FP8_MAX


def norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The rows with mean 0 and variance 1."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return centred / torch.sqrt((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + eps)


def plain(wide: Wide) -> Tensors:
    """The norm, weighted."""
    return {"output": norm(wide["hidden_states"], wide.number("eps")) * wide["weight"] + wide["bias"]}


def quantised(wide: Wide) -> Tensors:
    """The norm over a scale, within the range of e4m3."""
    return {"out": (plain(wide)["output"] / wide.number("scale")).clamp(-FP8_MAX, FP8_MAX)}


class LayerNorm(FormulaOp):
    """Beside the usual cases one whose bias takes away nearly all of the norm, so that small errors are left."""

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """In the case `cancelled` rows of about 1 and -1 in turn, and a bias that is their negative, weighted."""
        made = super().value(definition, name, spec, case, draw)
        if "noise" not in case.params or not isinstance(made, torch.Tensor) or name == "weight":
            return made
        signs = 1.0 - 2.0 * (torch.arange(made.shape[-1], device=made.device) % 2)
        if name == "bias":
            weight = draw.normal("weight", made.shape, TORCH_DTYPES[definition.inputs["weight"].dtype])
            return (-weight * signs).to(made.dtype)
        return (signs + made * float(case.params["noise"])).to(made.dtype)


OP = LayerNorm(
    "layernorm",
    Form("hidden_states[n h] weight[h] bias[h] -> output[n h]", plain, constants=("eps",)),
    Form("hidden_states[n h] weight[h] bias[h] scale -> out[n h]", quantised, constants=("eps",)),
    scalars={"scale": 0.75},
    adversarial={**ADVERSARIAL, "cancelled": {"noise": 2.0**-6}},
)
