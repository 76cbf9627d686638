"""Liger-Kernel's rotary embedding in Triton: halves of the rotated width, in place, on copies."""

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, tensor
from traceproof.ops.base import Unsupported, Values
from traceproof.ops.common.rotary import Pairing, pairing
from traceproof.ops.rope.ground_truths import ROTARY


def _accepts(definition: Definition) -> bool:
    """One width of q and k, whose first part is rotated by halves."""
    widths = {(definition.inputs[name].shape or ("",))[-1] for name in ("q", "k")}
    try:
        return len(widths) == 1 and pairing(definition, "cos_sin_cache") is Pairing.HALVES
    except Unsupported:
        return False


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """Tokens are one sequence [1, heads, tokens, width]; cosines are one half wide, so the width is told."""
    del definition
    q, k = tensor(inputs, "q").clone(), tensor(inputs, "k").clone()
    cache = tensor(inputs, "cos_sin_cache")
    cos, sin = cache[tensor(inputs, "positions").long()].float().chunk(2, dim=-1)
    turned = api["rope"](q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin, rotary_dim=cache.shape[-1])
    return {"q_out": turned[0][0].transpose(0, 1), "k_out": turned[1][0].transpose(0, 1)}


ADAPTERS = (Adapter("rope_forward", ROTARY, _call, ("rope",), accepts=_accepts, sm=((8, 0), (12, 9))),)
