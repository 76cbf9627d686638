"""SGLang's norm in its native form."""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.rmsnorm.ground_truths import EITHER, NORM
from traceproof.ops.rmsnorm.oracle import OP
from traceproof.stacks.sglang.boot import publish


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    publish()
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    kind = "GemmaRMSNorm" if OP.weight_offset(definition) else "RMSNorm"
    norm = api[kind](weight.shape[0], eps=OP.eps(definition))
    norm.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    if "residual" not in inputs:
        return {"output": norm.forward_native(hidden.clone())}
    output, total = norm.forward_native(hidden.clone(), tensor(inputs, "residual").clone())
    outputs = {"output": output, "residual_out": total}
    return {name: outputs[name] for name in definition.outputs}


def _is_plain(definition: Definition) -> bool:
    return OP.weight_offset(definition) == 0.0


def _is_gemma(definition: Definition) -> bool:
    return OP.weight_offset(definition) == 1.0


ADAPTERS = (
    Adapter("RMSNorm.forward_native", EITHER, _norm, ("RMSNorm",), accepts=_is_plain),
    # Not with a residual: it rounds the sum before it norms it, which its own CUDA kernel does not.
    Adapter("GemmaRMSNorm.forward_native", NORM, _norm, ("GemmaRMSNorm",), accepts=_is_gemma),
)
