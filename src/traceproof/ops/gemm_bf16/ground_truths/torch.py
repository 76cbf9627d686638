"""PyTorch's product in float32, rounded once."""

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.gemm_bf16.ground_truths import BIASED

NAME = "torch:matmul"


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    a, b = tensor(inputs, "A").float(), tensor(inputs, "B").float()
    product = api[NAME](a, b)
    if "bias" in inputs:
        product = product + tensor(inputs, "bias").float()
    return {"C": product.to(TORCH_DTYPES[definition.outputs["C"].dtype])}


ADAPTERS = (Adapter("matmul", BIASED, _product, (NAME,)),)
