"""Flash Linear Attention's gated delta rule, pure Triton.

Arguments go by keyword: the two functions order them differently. States are [.., K, V] there, and are
transposed on the way in and out: the option that spares it has changed its name between versions.
"""

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, tensor
from traceproof.ops.base import Values
from traceproof.ops.gdn.forms import Form, is_form
from traceproof.ops.gdn.ground_truths import DECODE, MTP, PREFILL
from traceproof.ops.gdn.ground_truths.common import beta, log_decay, recurrent, scale, state

SM = ((8, 0), (12, 9))


def _flip(states: torch.Tensor) -> torch.Tensor:
    return states.transpose(-1, -2).contiguous()


def _step(api: Api, inputs: Values, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output, after = recurrent(api, inputs, _flip(states))
    return output, _flip(after)


def _decode(api: Api, definition: Definition, inputs: Values) -> Outputs:
    del definition
    output, after = _step(api, inputs, state(inputs, tensor(inputs, "q").shape[0]))
    return {"output": output, "new_state": after}


def _mtp(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """Picks the named slots out of the pool and puts them back."""
    del definition
    pool, slots = tensor(inputs, "initial_state").clone(), tensor(inputs, "initial_state_indices").long()
    output, after = _step(api, inputs, pool[slots])
    pool[slots] = after
    return {"output": output, "final_state": pool}


def _prefill(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """All sequences in one row of tokens, empty ones among them: such a one keeps its state."""
    del definition
    states = state(inputs, len(tensor(inputs, "cu_seqlens")) - 1)
    if not tensor(inputs, "q").shape[0]:
        return {"output": torch.empty_like(tensor(inputs, "v")), "new_state": states}
    output, after = api["chunk"](
        q=tensor(inputs, "q")[None],
        k=tensor(inputs, "k")[None],
        v=tensor(inputs, "v")[None],
        g=log_decay(inputs)[None],
        beta=beta(inputs)[None],
        scale=scale(inputs),
        initial_state=_flip(states),
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=tensor(inputs, "cu_seqlens"),
    )
    return {"output": output[0], "new_state": _flip(after)}


ADAPTERS = (
    Adapter(
        "fused_recurrent_gated_delta_rule",
        DECODE,
        _decode,
        ("recurrent",),
        accepts=lambda definition: is_form(definition, Form.DECODE),
        sm=SM,
    ),
    Adapter("fused_recurrent_gated_delta_rule on a pool", MTP, _mtp, ("recurrent",), sm=SM),
    Adapter("chunk_gated_delta_rule", PREFILL, _prefill, ("chunk",), sm=SM),
)
