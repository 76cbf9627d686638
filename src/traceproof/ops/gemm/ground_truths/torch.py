"""PyTorch's matrix product, C = A @ B.T."""

from dataclasses import replace

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.gemm.ground_truths import PRODUCT


def _linear(api: Api, _: Definition, inputs: Values) -> Outputs:
    return {"C": api["linear"](tensor(inputs, "A"), tensor(inputs, "B"))}


ANY_ROWS = replace(PRODUCT, rows=None)  # PyTorch takes none, too

ADAPTERS = (Adapter("functional.linear", ANY_ROWS, _linear, ("linear",)),)
