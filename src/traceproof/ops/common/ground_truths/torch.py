"""PyTorch's operations in float32, as kernels compute."""

import torch

from traceproof.ops.adapter import Api, Definition, Values, tensor

LARGEST = "torch:amax"


def scaled(api: Api, definition: Definition, inputs: Values, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x over the scales of their blocks, [rows, columns], and these, [rows, blocks], both float32.

    The largest value of a block becomes `largest`.
    """
    x, shape = tensor(inputs, "x").float(), definition.outputs["scale"].shape or ()
    count = definition.const_axes[shape[1]]
    blocks = x.reshape(len(x), count, x.shape[1] // count)
    scale = api[LARGEST](blocks.abs(), -1, keepdim=True) / largest
    return (blocks / scale).reshape(x.shape), scale.squeeze(-1)
