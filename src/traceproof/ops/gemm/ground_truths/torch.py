"""PyTorch's matrix product, C = A @ B.T."""

from __future__ import annotations

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, names, tensor
from traceproof.ops.base import Values


def _linear(api: Api, definition: Definition, inputs: Values) -> Outputs:
    del definition
    return {"C": api["linear"](tensor(inputs, "A"), tensor(inputs, "B"))}


ADAPTERS = (
    Adapter(name="functional.linear", inputs=names("A B"), outputs=names("C"), apis=("linear",), call=_linear),
)
