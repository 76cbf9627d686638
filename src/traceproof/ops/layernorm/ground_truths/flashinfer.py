"""FlashInfer's layer norm: bfloat16 rows, weights in float32."""

from traceproof.ops.adapter import SM75, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.layernorm.ground_truths import NORM

NAME = "flashinfer.norm:layernorm"


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight, bias = (tensor(inputs, name) for name in ("hidden_states", "weight", "bias"))
    return {"output": api[NAME](hidden, weight, bias, definition.constants.number("eps"))}


def _accepts(definition: Definition) -> bool:
    rows, weight = definition.inputs["hidden_states"], definition.inputs["weight"]
    return rows.dtype == "bfloat16" and weight.dtype == "float32"


ADAPTERS = (Adapter("norm.layernorm", NORM, _norm, (NAME,), accepts=_accepts, sm=SM75),)
