"""SGLang's compiled gated activations."""

from traceproof.ops.activation.ground_truths import fused
from traceproof.ops.activation.oracle import GELU, SILU, TANH, activation_of
from traceproof.ops.adapter import Api, Definition, Outputs, Values, tensor

PLACES = {SILU: "sgl_kernel:silu_and_mul", GELU: "sgl_kernel:gelu_and_mul", TANH: "sgl_kernel:gelu_tanh_and_mul"}


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    return {"output": api[PLACES[str(activation_of(definition))]](tensor(inputs, "input"))}


ADAPTERS = fused(PLACES, _call, packages=("sgl_kernel",))
