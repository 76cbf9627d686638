"""FlashInfer's merges."""

from traceproof.ops.adapter import SM75, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.cascade_merge.ground_truths import IN_PLACE, MANY, PAIR

ONE, ALL, WITHIN = (f"flashinfer.cascade:merge_{what}" for what in ("state", "states", "state_in_place"))


def _pair(api: Api, definition: Definition, inputs: Values) -> Outputs:
    merged = api[ONE](*(tensor(inputs, name) for name in ("v_a", "s_a", "v_b", "s_b")))
    return dict(zip(definition.outputs, merged, strict=True))


def _many(api: Api, definition: Definition, inputs: Values) -> Outputs:
    return dict(zip(definition.outputs, api[ALL](tensor(inputs, "v"), tensor(inputs, "s")), strict=True))


def _in_place(api: Api, _: Definition, inputs: Values) -> Outputs:
    v, s = tensor(inputs, "v").clone(), tensor(inputs, "s").clone()
    api[WITHIN](v, s, tensor(inputs, "v_other"), tensor(inputs, "s_other"), mask=inputs.get("mask"))
    return {"v_out": v, "s_out": s}


ADAPTERS = (
    Adapter("cascade.merge_state", PAIR, _pair, (ONE,), sm=SM75),
    Adapter("cascade.merge_states", MANY, _many, (ALL,), sm=SM75),
    Adapter("cascade.merge_state_in_place", IN_PLACE, _in_place, (WITHIN,), sm=SM75),
)
