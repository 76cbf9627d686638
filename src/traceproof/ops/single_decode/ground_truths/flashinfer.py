"""FlashInfer's decode of one request."""

from traceproof.ops.adapter import SM75, Adapter, Api, Definition, Outputs, Values, signature, tensor

NAME = "flashinfer.decode:single_decode_with_kv_cache"
KEYWORDS = ("sm_scale", "logits_soft_cap", "window_left")


def _attend(api: Api, _: Definition, inputs: Values) -> Outputs:
    given = {name: inputs[name] for name in KEYWORDS if inputs.get(name) is not None}
    return {"output": api[NAME](*(tensor(inputs, name) for name in "qkv"), **given)}


CALL = signature("q k v [sm_scale] [logits_soft_cap] [window_left] -> output")
ADAPTERS = (Adapter("decode.single_decode_with_kv_cache", CALL, apis=(NAME,), call=_attend, sm=SM75),)
