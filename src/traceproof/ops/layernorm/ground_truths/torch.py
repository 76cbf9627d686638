"""PyTorch's layer norm, in float32 as kernels compute."""

from dataclasses import replace

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.layernorm.ground_truths import NORM

NAME = "torch.nn.functional:layer_norm"


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight, bias = (tensor(inputs, name).float() for name in ("hidden_states", "weight", "bias"))
    y = api[NAME](hidden, (hidden.shape[-1],), weight, bias, eps=definition.constants.number("eps"))
    return {"output": y.to(TORCH_DTYPES[definition.outputs["output"].dtype])}


ADAPTERS = (Adapter("functional.layer_norm", replace(NORM, rows=None), _norm, (NAME,)),)
