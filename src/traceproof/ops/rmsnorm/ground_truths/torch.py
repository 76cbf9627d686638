"""PyTorch's root mean square norm."""

from dataclasses import replace

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.rmsnorm.ground_truths import EITHER
from traceproof.ops.rmsnorm.oracle import OP


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """In float32, as kernels do: PyTorch's own rounds between the steps."""
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    total = hidden.float()
    if "residual" in inputs:
        total = total + tensor(inputs, "residual").float()
    gain = weight.float()
    if OP.weight_offset(definition):
        gain = gain + OP.weight_offset(definition)
    y = api["rms_norm"](total, weight.shape, gain, eps=OP.eps(definition))
    outputs = {"output": y, "residual_out": total}
    dtypes = {name: TORCH_DTYPES[spec.dtype] for name, spec in definition.outputs.items()}  # a baseline keeps them
    return {name: outputs[name].to(dtype) for name, dtype in dtypes.items()}


ANY_ROWS = replace(EITHER, rows=None)  # PyTorch takes none, too

ADAPTERS = (Adapter("functional.rms_norm", ANY_ROWS, _norm, ("rms_norm",)),)
