"""FlashInfer's product for new GPUs, whose B lies in columns."""

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.common.ground_truths.flashinfer import in_columns
from traceproof.ops.gemm_bf16.ground_truths import PRODUCT

NAME = "flashinfer.gemm:mm_bf16"


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    dtype = TORCH_DTYPES[definition.outputs["C"].dtype]
    return {"C": api[NAME](tensor(inputs, "A"), in_columns(tensor(inputs, "B")), out_dtype=dtype)}


ADAPTERS = (Adapter("gemm.mm_bf16", PRODUCT, _product, (NAME,), sm=((10, 0), (10, 3))),)
