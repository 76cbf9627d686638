"""PyTorch's grouped convolution, in float32 as kernels compute."""

from dataclasses import replace

import torch

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.causal_conv1d.ground_truths import ROWS

CONV, SILU = "torch.nn.functional:conv1d", "torch.nn.functional:silu"


def _rows(api: Api, definition: Definition, inputs: Values) -> Outputs:
    x, weight, bias = tensor(inputs, "x").float(), tensor(inputs, "weight").float(), inputs.get("bias")
    bias = bias.float() if isinstance(bias, torch.Tensor) else None
    total = api[CONV](x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight))
    y = api[SILU](total[..., : x.shape[-1]])
    return {"output": y.to(TORCH_DTYPES[definition.outputs["output"].dtype])}


ADAPTERS = (Adapter("functional.conv1d", replace(ROWS, rows=None), apis=(CONV, SILU), call=_rows),)
