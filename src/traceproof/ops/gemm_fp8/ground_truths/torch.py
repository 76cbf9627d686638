"""PyTorch's product in float32 of the scaled matrices, rounded once."""

from dataclasses import replace

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.gemm_fp8.ground_truths import PRODUCT

NAME = "torch.nn.functional:linear"


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    a, b, a_scale, b_scale = (tensor(inputs, name).float() for name in ("a", "b", "a_scale", "b_scale"))
    height, width = b.shape[0] // b_scale.shape[0], b.shape[1] // b_scale.shape[1]
    a = a * a_scale.repeat_interleave(width, 1)
    b = b * b_scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return {"out": api[NAME](a, b).to(TORCH_DTYPES[definition.outputs["out"].dtype])}


ADAPTERS = (Adapter("functional.linear", replace(PRODUCT, rows=None), apis=(NAME,), call=_product),)
