"""Liger-Kernel's layer norm in Triton: a row per program, one dtype for rows and outputs."""

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.layernorm.ground_truths import NORM


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight, bias = (tensor(inputs, name) for name in ("hidden_states", "weight", "bias"))
    returned = api["layer_norm"](hidden.contiguous(), weight, bias, definition.constants.number("eps"))
    return {"output": returned[0]}


def _one_dtype(definition: Definition) -> bool:
    return definition.inputs["hidden_states"].dtype == definition.outputs["output"].dtype


ADAPTERS = (Adapter("layer_norm_forward", NORM, _norm, ("layer_norm",), accepts=_one_dtype, sm=SM80),)
