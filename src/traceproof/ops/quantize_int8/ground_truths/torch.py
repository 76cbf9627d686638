"""PyTorch's operations in float32, as kernels compute."""

from dataclasses import replace

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, tensor
from traceproof.ops.base import Values
from traceproof.ops.quantize_int8.ground_truths import ROWS

LARGEST = "torch:amax"


def _quantise(api: Api, definition: Definition, inputs: Values) -> Outputs:
    x, shape = tensor(inputs, "x").float(), definition.outputs["scale"].shape or ()
    blocks = (
        x.reshape(len(x), definition.const_axes[shape[1]], -1)
        if x.numel()
        else x.reshape(0, definition.const_axes[shape[1]], x.shape[1] // definition.const_axes[shape[1]])
    )
    scale = api[LARGEST](blocks.abs(), -1, keepdim=True) / 127.0
    values = (blocks / scale).reshape(x.shape)
    return {"q": values.round().to(torch.int8), "scale": scale.squeeze(-1)}


ADAPTERS = (Adapter("amax", replace(ROWS, rows=None), apis=(LARGEST,), call=_quantise),)
