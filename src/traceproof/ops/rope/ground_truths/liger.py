"""Liger-Kernel's rotary embedding in Triton: halves of the rotated width, in place, on copies."""

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, tensor
from traceproof.ops.base import Unsupported, Values
from traceproof.ops.rope.ground_truths import ROTARY
from traceproof.ops.rope.oracle import pairs_halves


def _accepts(definition: Definition) -> bool:
    """One width of q and k, whose first part is rotated by halves."""
    widths = {(definition.inputs[name].shape or ("",))[-1] for name in ("q", "k")}
    try:
        return len(widths) == 1 and pairs_halves(definition)
    except Unsupported:
        return False


def _call(api: Api, _: Definition, inputs: Values) -> Outputs:
    """Tokens are sequences [batch, heads, tokens, width]: two where their number is even, so both forms are run.

    Cosines are as wide as what is rotated, their halves alike: releases differ in what they take for it.
    """
    angles = tensor(inputs, "cos_sin_cache")[tensor(inputs, "positions").long()].float()
    batch = 1 if angles.shape[0] % 2 else 2
    cos, sin = (half.repeat(1, 2) for half in angles.chunk(2, dim=-1))
    rows = (tensor(inputs, "q").clone(), tensor(inputs, "k").clone(), cos, sin)
    q, k, cos, sin = (one.reshape(batch, -1, *one.shape[1:]) for one in rows)
    turned = api["rope"](q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return {name: turned[index].transpose(1, 2).flatten(0, 1) for index, name in enumerate(("q_out", "k_out"))}


ADAPTERS = (Adapter("rope_forward", ROTARY, _call, ("rope",), accepts=_accepts, sm=SM80),)
