"""PyTorch's norm and sigmoid, in float32 as kernels compute."""

from dataclasses import replace

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, scalar, tensor
from traceproof.ops.rmsnorm_sigmoid_gate.ground_truths import GATED

NORM, SIGMOID = "torch.nn.functional:rms_norm", "torch:sigmoid"


def _gated(api: Api, definition: Definition, inputs: Values) -> Outputs:
    x, gate = tensor(inputs, "input").float(), tensor(inputs, "gate").float()
    y = api[NORM](x, x.shape[-1:], eps=scalar(inputs, "eps")) * api[SIGMOID](gate)
    return {"output": y.to(TORCH_DTYPES[definition.outputs["output"].dtype])}


ADAPTERS = (Adapter("functional.rms_norm", replace(GATED, rows=None), _gated, (NORM, SIGMOID)),)
