"""FlashInfer's batched fp8 product, whose B lies in columns."""

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.bmm_fp8.ground_truths import PRODUCT

NAME = "flashinfer.gemm:bmm_fp8"


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    b = tensor(inputs, "B").mT.contiguous().mT
    dtype = TORCH_DTYPES[definition.outputs["C"].dtype]
    return {"C": api[NAME](tensor(inputs, "A"), b, tensor(inputs, "A_scale"), tensor(inputs, "B_scale"), dtype)}


ADAPTERS = (Adapter("gemm.bmm_fp8", PRODUCT, _product, (NAME,), sm=((8, 9), (12, 1))),)
