"""PyTorch's product in float32, rounded once."""

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.dequantize_fp8.ground_truths import ROWS

NAME = "torch:mul"


def _widened(api: Api, definition: Definition, inputs: Values) -> Outputs:
    q, scale = tensor(inputs, "q").float(), tensor(inputs, "scale")
    y = api[NAME](q, scale.repeat_interleave(q.shape[1] // scale.shape[1], 1))
    return {"y": y.to(TORCH_DTYPES[definition.outputs["y"].dtype])}


ADAPTERS = (Adapter("mul", ROWS, apis=(NAME,), call=_widened),)
