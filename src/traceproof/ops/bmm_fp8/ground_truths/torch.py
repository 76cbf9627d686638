"""PyTorch's product in float32, rounded once."""

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.bmm_fp8.ground_truths import PRODUCT

NAME = "torch:bmm"


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    a, b = (tensor(inputs, name).float() * tensor(inputs, f"{name}_scale") for name in ("A", "B"))
    return {"C": api[NAME](a, b).to(TORCH_DTYPES[definition.outputs["C"].dtype])}


ADAPTERS = (Adapter("bmm", PRODUCT, _product, (NAME,)),)
