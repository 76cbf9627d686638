"""FlashInfer's rotary embedding with a cosine and sine cache, in place on copies."""

from traceproof.ops.adapter import SM75, Adapter, Api, Definition, Module, Outputs, Values, tensor
from traceproof.ops.rope.ground_truths import ROTARY
from traceproof.ops.rope.oracle import pairs_halves


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """The kernel wants tokens by heads times channels; which channels pair stands only in the reference."""
    q, k = tensor(inputs, "q").clone(), tensor(inputs, "k").clone()
    api["rope"](
        tensor(inputs, "positions"),
        q.view(q.shape[0], -1),
        k.view(k.shape[0], -1),
        q.shape[-1],
        tensor(inputs, "cos_sin_cache"),
        is_neox=pairs_halves(definition),
    )
    return {"q_out": q, "k_out": k}


ADAPTERS = (
    Adapter(
        "apply_rope_with_cos_sin_cache_inplace",
        ROTARY,
        _call,
        ("rope",),
        modules=lambda _, __: (Module("gen_rope"),),
        sm=SM75,
    ),
)
