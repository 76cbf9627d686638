"""Flash Linear Attention's gated delta rule, pure Triton.

Arguments go by keyword: the two functions order them differently. States are [.., K, V] there, and are
transposed on the way in and out: the option that spares it has changed its name between versions.
"""

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.gdn.forms import Form, is_form
from traceproof.ops.gdn.ground_truths import DECODE, MTP, PREFILL
from traceproof.ops.gdn.ground_truths.common import by_token, in_one_row, state, turned


def _by_token(api: Api, _: Definition, inputs: Values) -> Outputs:
    return by_token(api, inputs, flipped=True)


def _prefill(api: Api, _: Definition, inputs: Values) -> Outputs:
    """All sequences in one row of tokens, empty ones among them: such a one keeps its state."""
    states = state(inputs, len(tensor(inputs, "cu_seqlens")) - 1)
    if not tensor(inputs, "q").shape[0]:
        return {"output": torch.empty_like(tensor(inputs, "v")), "new_state": states}
    output, after = api["chunk"](
        **in_one_row(inputs),
        initial_state=turned(states, flipped=True),
        output_final_state=True,
        cu_seqlens=tensor(inputs, "cu_seqlens"),
    )
    return {"output": output[0], "new_state": turned(after, flipped=True)}


ADAPTERS = (
    Adapter(
        "fused_recurrent_gated_delta_rule",
        DECODE,
        _by_token,
        ("recurrent",),
        accepts=lambda definition: is_form(definition, Form.DECODE),
        sm=SM80,
    ),
    Adapter("fused_recurrent_gated_delta_rule on a pool", MTP, _by_token, ("recurrent",), sm=SM80),
    Adapter("chunk_gated_delta_rule", PREFILL, _prefill, ("chunk",), sm=SM80),
)
