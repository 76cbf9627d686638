"""FlashInfer's product with scales per block of 128."""

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, dim, tensor
from traceproof.ops.common.quant import BLOCK
from traceproof.ops.gemm_fp8.ground_truths import PRODUCT

NAME = "flashinfer.gemm:fp8_blockscale_gemm_sm90"


def _product(api: Api, _: Definition, inputs: Values) -> Outputs:
    a, b, a_scale, b_scale = (tensor(inputs, name) for name in ("a", "b", "a_scale", "b_scale"))
    return {"out": api[NAME](a, b, a_scale, b_scale)}


def _accepts(definition: Definition) -> bool:
    inner, blocks = dim(definition, "b", 1), dim(definition, "b_scale", 1)
    return inner is not None and blocks is not None and inner == blocks * BLOCK


ADAPTERS = (
    Adapter("gemm.fp8_blockscale_gemm_sm90", PRODUCT, _product, (NAME,), accepts=_accepts, sm=((9, 0), (9, 0))),
)
