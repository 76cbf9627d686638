"""causal_conv1d: silu(sum_j weight[j] x[t - width + 1 + j] + bias) per channel, over rows or a step at a time."""

import torch

from traceproof.ops.base import Tensors
from traceproof.ops.common.gates import sigmoid
from traceproof.ops.compare import Exact
from traceproof.ops.formula import Form, FormulaOp, Wide


def activated(wide: Wide, total: torch.Tensor, channels: int) -> torch.Tensor:
    """A sum over the window with the bias of each channel, and SiLU; `channels`: axes after the channels'."""
    if "bias" in wide:
        total = total + wide["bias"].reshape(-1, *[1] * channels)
    return total * sigmoid(total)


def over_rows(wide: Wide) -> Tensors:
    """Whole sequences [b c l], zeros before their first element."""
    x, weight = wide["x"], wide["weight"]
    width, length = weight.shape[1], x.shape[-1]
    padded = torch.nn.functional.pad(x, (width - 1, 0))
    total = torch.zeros_like(x)
    for place in range(width):
        total = total + weight[:, place, None] * padded[..., place : place + length]
    return {"output": activated(wide, total, 1)}


def one_step(wide: Wide) -> Tensors:
    """One element [b c] after the last ones of its sequence, which the state [b c w] holds, the oldest first."""
    state = torch.cat([wide["conv_state"][..., 1:], wide["x"].unsqueeze(-1)], -1)
    total = (state * wide["weight"]).sum(-1)
    return {"output": activated(wide, total, 0), "new_state": state}


OP = FormulaOp(
    "causal_conv1d",
    Form("x[b c l] weight[c w] bias[c]? -> output[b c l]", over_rows),
    Form("x[b c] conv_state[b c w] weight[c w] bias[c]? -> output[b c] new_state[b c w]", one_step),
    sizes={"l": (5, 1, 33, 4, 70)},
    data=("x", "conv_state"),
    gates={"new_state": Exact()},
)
