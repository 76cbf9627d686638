"""FlashInfer's gated norm, which writes to its input."""

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, dim, scalar, tensor
from traceproof.ops.rmsnorm_sigmoid_gate.ground_truths import GATED

NAME = "flashinfer.norm:rmsnorm_sigmoid_gate"
HEAD_DIM = 64  # the only size that it is compiled for


def _accepts(definition: Definition) -> bool:
    return dim(definition, "input", -1) == HEAD_DIM


def _gated(api: Api, _: Definition, inputs: Values) -> Outputs:
    output = tensor(inputs, "input").clone()
    api[NAME](output, tensor(inputs, "gate"), eps=scalar(inputs, "eps"))
    return {"output": output}


ADAPTERS = (Adapter("norm.rmsnorm_sigmoid_gate", GATED, _gated, (NAME,), accepts=_accepts, sm=((10, 0), (10, 9))),)
