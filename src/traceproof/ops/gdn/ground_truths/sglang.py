"""SGLang's gated delta rule: its own branch of the Triton kernels, with states [.., V, K]."""

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.gdn.forms import Form, is_form
from traceproof.ops.gdn.ground_truths import DECODE, MTP, PREFILL
from traceproof.ops.gdn.ground_truths.common import arguments, by_token, in_one_row, state, with_tokens


def _decode(api: Api, _: Definition, inputs: Values) -> Outputs:
    return by_token(api, inputs, flipped=False)


def _mtp(api: Api, _: Definition, inputs: Values) -> Outputs:
    """Updates the named slots of the pool in place."""
    pool = tensor(inputs, "initial_state").clone()
    output = api["recurrent_on_pool"](
        **arguments(inputs),
        initial_state_source=pool,
        initial_state_indices=tensor(inputs, "initial_state_indices"),
    )
    return {"output": output, "final_state": pool}


def _prefill(api: Api, _: Definition, inputs: Values) -> Outputs:
    """Updates the states in place, each where its index points. A sequence without tokens keeps its own."""
    states = state(inputs, len(tensor(inputs, "cu_seqlens")) - 1)
    rows, bounds = with_tokens(inputs)
    if not tensor(inputs, "q").shape[0]:
        return {"output": torch.empty_like(tensor(inputs, "v")), "new_state": states}
    returned = api["chunk"](
        **in_one_row(inputs), initial_state=states, initial_state_indices=rows.to(torch.int32), cu_seqlens=bounds
    )
    return {"output": returned[0][0], "new_state": states}


ADAPTERS = (
    Adapter(
        "fla.fused_recurrent_gated_delta_rule",
        DECODE,
        _decode,
        ("recurrent",),
        accepts=lambda definition: is_form(definition, Form.DECODE),
        sm=SM80,
    ),
    Adapter("fla.fused_recurrent_gated_delta_rule_update", MTP, _mtp, ("recurrent_on_pool",), sm=SM80),
    Adapter("fla.chunk_gated_delta_rule", PREFILL, _prefill, ("chunk",), sm=SM80),
)
