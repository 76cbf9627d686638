"""SGLang's compiled convolution, a step at a time."""

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.causal_conv1d.ground_truths import STEP

NAME = "sgl_kernel:causal_conv1d_update"
SILU = True


def _step(api: Api, _: Definition, inputs: Values) -> Outputs:
    """In place: the row becomes the output; its state keeps the last elements but one."""
    output, state, bias = tensor(inputs, "x").clone(), tensor(inputs, "conv_state"), inputs.get("bias")
    kept = state[..., 1:].contiguous()
    api[NAME](output.unsqueeze(-1), kept, tensor(inputs, "weight"), bias, SILU, None, None, -1)
    return {"output": output, "new_state": torch.cat([state[..., 1:], tensor(inputs, "x").unsqueeze(-1)], -1)}


ADAPTERS = (Adapter("causal_conv1d_update", STEP, apis=(NAME,), call=_step, packages=("sgl_kernel",), sm=SM80),)
