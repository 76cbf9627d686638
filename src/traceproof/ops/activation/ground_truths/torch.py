"""PyTorch's activations, in float32 as kernels compute."""

from dataclasses import replace

from traceproof.ops.activation.ground_truths import GATED
from traceproof.ops.activation.oracle import TANH, activation_of
from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor

SILU, GELU = "torch.nn.functional:silu", "torch.nn.functional:gelu"


def _silu(api: Api, definition: Definition, inputs: Values) -> Outputs:
    gate, up = tensor(inputs, "input").float().chunk(2, -1)
    dtype = TORCH_DTYPES[definition.outputs["output"].dtype]
    return {"output": (api[SILU](gate) * up).to(dtype)}


def _gelu(api: Api, definition: Definition, inputs: Values) -> Outputs:
    gate, up = tensor(inputs, "input").float().chunk(2, -1)
    form = "tanh" if activation_of(definition) == TANH else "none"
    dtype = TORCH_DTYPES[definition.outputs["output"].dtype]
    return {"output": (api[GELU](gate, approximate=form) * up).to(dtype)}


ANY_ROWS = replace(GATED, rows=None)  # PyTorch takes none, too

ADAPTERS = (
    Adapter(
        "functional.silu", ANY_ROWS, _silu, (SILU,), accepts=lambda definition: activation_of(definition) == "silu"
    ),
    Adapter(
        "functional.gelu",
        ANY_ROWS,
        _gelu,
        (GELU,),
        accepts=lambda definition: activation_of(definition) in {"gelu", TANH},
    ),
)
