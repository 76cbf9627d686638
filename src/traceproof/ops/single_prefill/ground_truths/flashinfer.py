"""FlashInfer's prefill of one request."""

from traceproof.ops.adapter import SM75, Adapter, Api, Definition, Outputs, Values, signature, tensor

NAME = "flashinfer.prefill:single_prefill_with_kv_cache"
KEYWORDS = ("sm_scale", "logits_soft_cap", "window_left")


def _attend(api: Api, definition: Definition, inputs: Values) -> Outputs:
    q, k, v = (tensor(inputs, name) for name in "qkv")
    given = {name: inputs[name] for name in KEYWORDS if inputs.get(name) is not None}
    causal = bool(definition.constants.number("causal"))
    return {"output": api[NAME](q, k, v, causal=causal, **given)}


CALL = signature("q k v [sm_scale] [logits_soft_cap] [window_left] -> output", rows="q")
ADAPTERS = (Adapter("prefill.single_prefill_with_kv_cache", CALL, apis=(NAME,), call=_attend, sm=SM75),)
