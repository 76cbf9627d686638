"""SGLang's rotary embedding, out of its kernel package: in place, on copies."""

import torch

from traceproof.ops.adapter import SM80, TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.rope.ground_truths import ROTARY
from traceproof.ops.rope.oracle import pairs_halves
from traceproof.stacks.sglang.boot import KERNELS

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})


def _accepts(definition: Definition) -> bool:
    """Instances exist for one dtype of q and k, and a cache in it or in float32."""
    q, k, cache = (TORCH_DTYPES[definition.inputs[name].dtype] for name in ("q", "k", "cos_sin_cache"))
    widths = {(definition.inputs[name].shape or ("",))[-1] for name in ("q", "k")}
    return q == k and len(widths) == 1 and q in FLOATS and cache in {q, torch.float32}


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """The kernel reads positions as int64, and tokens by heads times channels."""
    q, k = tensor(inputs, "q").clone(), tensor(inputs, "k").clone()
    api["rotary_embedding"](
        tensor(inputs, "positions").long(),
        q.view(q.shape[0], -1),
        k.view(k.shape[0], -1),
        q.shape[-1],
        tensor(inputs, "cos_sin_cache"),
        pairs_halves(definition),
    )
    return {"q_out": q, "k_out": k}


ADAPTERS = (
    Adapter(
        "sgl_kernel.rotary_embedding",
        ROTARY,
        _call,
        ("rotary_embedding",),
        accepts=_accepts,
        packages=(KERNELS,),
        sm=SM80,
    ),
)
