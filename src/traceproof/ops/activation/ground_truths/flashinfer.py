"""FlashInfer's gated activations."""

from __future__ import annotations

from collections.abc import Callable

from traceproof.dataset.definition import Definition
from traceproof.ops.activation.forms import GELU, SILU, TANH, activation_of
from traceproof.ops.adapter import Adapter, Api, Outputs, names, tensor
from traceproof.ops.base import Values

PLACES = {
    SILU: "flashinfer.activation:silu_and_mul",
    GELU: "flashinfer.activation:gelu_and_mul",
    TANH: "flashinfer.activation:gelu_tanh_and_mul",
}


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    return {"output": api[PLACES[str(activation_of(definition))]](tensor(inputs, "input"))}


def _accepts(kind: str) -> Callable[[Definition], bool]:
    return lambda definition: activation_of(definition) == kind


ADAPTERS = tuple(
    Adapter(
        name=place.replace(":", "."),
        inputs=names("input"),
        outputs=names("output"),
        accepts=_accepts(kind),
        dtypes=names("float16 bfloat16"),
        apis=(place,),
        call=_call,
        sm=((7, 5), (12, 9)),
        rows="input",
    )
    for kind, place in PLACES.items()
)
