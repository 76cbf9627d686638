"""PyTorch's product in float32, rounded once."""

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.bmm_bf16.ground_truths import PRODUCT

NAME = "torch:bmm"


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    a, b = tensor(inputs, "A").float(), tensor(inputs, "B").float()
    return {"C": api[NAME](a, b).to(TORCH_DTYPES[definition.outputs["C"].dtype])}


ADAPTERS = (Adapter("bmm", PRODUCT, _product, (NAME,)),)
