"""SGLang's quantisation per token, compiled."""

import torch

from traceproof.ops.adapter import SM89, Adapter, Api, Definition, Outputs, Values, dim, tensor
from traceproof.ops.quantize_fp8.ground_truths import ROWS

NAME = "sgl_kernel:sgl_per_token_quant_fp8"


def _quantise(api: Api, _: Definition, inputs: Values) -> Outputs:
    x = tensor(inputs, "x")
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    api[NAME](x, q, scale)
    return {"q": q, "scale": scale}


def _accepts(definition: Definition) -> bool:
    shape = definition.outputs["scale"].shape or ("", "")
    hidden = dim(definition, "x", 1)
    return definition.const_axes.get(shape[1]) == 1 and hidden is not None and hidden % 8 == 0


ADAPTERS = (
    Adapter(
        "sgl_per_token_quant_fp8",
        ROWS,
        apis=(NAME,),
        call=_quantise,
        accepts=_accepts,
        packages=("sgl_kernel",),
        sm=SM89,
    ),
)
