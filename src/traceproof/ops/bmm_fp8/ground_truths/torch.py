"""PyTorch's product in float32, rounded once."""

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, tensor
from traceproof.ops.base import TORCH_DTYPES, Values
from traceproof.ops.bmm_fp8.ground_truths import PRODUCT

NAME = "torch:bmm"


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    a, b = (tensor(inputs, name).float() * tensor(inputs, f"{name}_scale") for name in ("A", "B"))
    return {"C": api[NAME](a, b).to(TORCH_DTYPES[definition.outputs["C"].dtype])}


ADAPTERS = (Adapter("bmm", PRODUCT, _product, (NAME,)),)
