"""PyTorch's product in float32, rounded once."""

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, tensor
from traceproof.ops.base import TORCH_DTYPES, Values
from traceproof.ops.gemm_bf16.ground_truths import PRODUCT

NAME = "torch:matmul"


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    a, b = tensor(inputs, "A").float(), tensor(inputs, "B").float()
    return {"C": api[NAME](a, b).to(TORCH_DTYPES[definition.outputs["C"].dtype])}


ADAPTERS = (Adapter("matmul", PRODUCT, _product, (NAME,)),)
