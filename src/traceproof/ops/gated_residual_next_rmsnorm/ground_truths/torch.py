"""PyTorch's norm twice, in float32 as kernels compute."""

from dataclasses import replace

import torch

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, scalar, tensor
from traceproof.ops.gated_residual_next_rmsnorm.ground_truths import GATED

NORM = "torch.nn.functional:rms_norm"


def _gated(api: Api, definition: Definition, inputs: Values) -> Outputs:
    branch, weight = tensor(inputs, "branch").float(), inputs.get("post_weight")
    if isinstance(weight, torch.Tensor):
        branch = branch * (weight.float() + float(inputs.get("post_gain_center") or 0.0))
    normed = api[NORM](branch, branch.shape[-1:], eps=scalar(inputs, "post_eps"))
    total = tensor(inputs, "alpha") * tensor(inputs, "residual") + tensor(inputs, "beta") * normed
    gain = tensor(inputs, "next_weight").float() + scalar(inputs, "next_gain_center")
    following = api[NORM](total, total.shape[-1:], gain, eps=scalar(inputs, "next_eps"))
    return {"residual_out": total, "ffn_input": following.to(TORCH_DTYPES[definition.outputs["ffn_input"].dtype])}


ADAPTERS = (Adapter("functional.rms_norm", replace(GATED, rows=None), _gated, (NORM,)),)
