"""PyTorch's norm, in float32 as kernels compute."""

from dataclasses import replace

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, scalar, tensor
from traceproof.ops.gated_residual_rmsnorm.ground_truths import GATED

NORM = "torch.nn.functional:rms_norm"


def _gated(api: Api, _: Definition, inputs: Values) -> Outputs:
    branch, weight = tensor(inputs, "branch").float(), inputs.get("weight")
    if isinstance(weight, torch.Tensor):
        branch = branch * (weight.float() + scalar(inputs, "gain_center"))
    normed = api[NORM](branch, branch.shape[-1:], eps=scalar(inputs, "eps"))
    return {"output": tensor(inputs, "alpha") * tensor(inputs, "residual") + tensor(inputs, "beta") * normed}


ADAPTERS = (Adapter("functional.rms_norm", replace(GATED, rows=None), _gated, (NORM,)),)
