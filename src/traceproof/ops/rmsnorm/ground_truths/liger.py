"""Liger-Kernel's norms in Triton. Casting mode `gemma` computes a row in float32, with any weight offset."""

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.rmsnorm.ground_truths import FUSED_ADD, NORM
from traceproof.ops.rmsnorm.oracle import OP


def _one_dtype(definition: Definition) -> bool:
    """Whether outputs have the dtype of the rows, as the kernels give them."""
    kinds = {definition.inputs[name].dtype for name in definition.inputs if name != "weight"}
    return len(kinds | {spec.dtype for spec in definition.outputs.values()}) == 1


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    offset = float(OP.weight_offset(definition))
    returned = api["rms_norm"](hidden.contiguous(), weight, OP.eps(definition), offset, "gemma", None)
    return {"output": returned[0]}


def _fused_add(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """The norm is that of the sum as it is stored."""
    hidden, residual = tensor(inputs, "hidden_states").contiguous(), tensor(inputs, "residual").contiguous()
    offset = float(OP.weight_offset(definition))
    returned = api["fused_add_rms_norm"](
        hidden, residual, tensor(inputs, "weight"), OP.eps(definition), offset, "gemma"
    )
    outputs = {"output": returned[0], "residual_out": returned[1]}
    return {name: outputs[name] for name in definition.outputs}


ADAPTERS = (
    Adapter("rms_norm_forward", NORM, _norm, ("rms_norm",), accepts=_one_dtype, sm=SM80),
    Adapter(
        "fused_add_rms_norm_forward", FUSED_ADD, _fused_add, ("fused_add_rms_norm",), accepts=_one_dtype, sm=SM80
    ),
)
