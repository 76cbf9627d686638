"""SGLang's rotary embedding in its native form."""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.rope.ground_truths import ROTARY
from traceproof.ops.rope.oracle import pairs_halves


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """In float32: the native form takes cosines in the data's dtype, which its kernels do not."""
    cache = tensor(inputs, "cos_sin_cache")
    cos, sin = cache[tensor(inputs, "positions").long()].float().chunk(2, dim=-1)
    halves = pairs_halves(definition)
    width = cache.shape[-1]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = api["apply_rotary_emb"](x[..., :width].float(), cos, sin, halves)
        return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)

    return {"q_out": rotate(tensor(inputs, "q")), "k_out": rotate(tensor(inputs, "k"))}


ADAPTERS = (Adapter("rotary_embedding.apply_rotary_emb", ROTARY, _call, ("apply_rotary_emb",)),)
