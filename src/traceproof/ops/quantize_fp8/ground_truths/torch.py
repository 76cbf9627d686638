"""PyTorch's operations in float32, as kernels compute."""

from dataclasses import replace

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values
from traceproof.ops.common.ground_truths.torch import LARGEST, scaled
from traceproof.ops.quantize_fp8.ground_truths import ROWS


def _quantise(api: Api, definition: Definition, inputs: Values) -> Outputs:
    values, scale = scaled(api, definition, inputs, 448.0)
    return {"q": values.to(torch.float8_e4m3fn), "scale": scale}


ADAPTERS = (Adapter("amax", replace(ROWS, rows=None), apis=(LARGEST,), call=_quantise),)
