"""FlashInfer's gated delta rule: decode, verification of draft tokens, prefill. States are [.., V, K] too."""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Module, Outputs, Values, dim, tensor
from traceproof.ops.gdn.forms import Form, is_form
from traceproof.ops.gdn.ground_truths import DECODE, MTP, PREFILL
from traceproof.ops.gdn.ground_truths.common import beta, log_decay, scale, state, with_tokens

HOPPER_UP = ((9, 0), (10, 9))
# Of 64 instances, a source of a minute and more each, calls reach those with a rate of updates, a decay and a
# state, without checkpoints.
PREFILL_SM90 = Module("gen_gdn_prefill", unused=r"_kernel_(half|bf16)_g\d(?!b1a1i1(c0)?$)")
HEAD_SIZE = 128  # the only one that the kernels are written for


def _wide(definition: Definition) -> bool:
    return dim(definition, "k", -1) == dim(definition, "v", -1) == HEAD_SIZE


def _gated(inputs: Values) -> dict[str, torch.Tensor]:
    return {name: tensor(inputs, name) for name in ("q", "k", "v", "A_log", "a", "dt_bias", "b")}


def _decode(api: Api, _: Definition, inputs: Values) -> Outputs:
    """Updates the state in place. `use_qk_l2norm` is on by default and not part of the definition."""
    carried = state(inputs, tensor(inputs, "q").shape[0])
    output, after = api["gdn_decode"](**_gated(inputs), state=carried, scale=scale(inputs), use_qk_l2norm=False)
    return {"output": output, "new_state": after}


def _mtp(api: Api, _: Definition, inputs: Values) -> Outputs:
    """Updates the pool in place; with updates disabled it would return what came in."""
    output, after = api["gdn_mtp"](
        **_gated(inputs),
        initial_state=tensor(inputs, "initial_state").clone(),
        initial_state_indices=tensor(inputs, "initial_state_indices"),
        scale=scale(inputs),
        disable_state_update=False,
        use_qk_l2norm=False,
    )
    return {"output": output, "final_state": after}


def _prefill(api: Api, _: Definition, inputs: Values) -> Outputs:
    """Wants the decay itself where others want its logarithm.

    A sequence without tokens keeps its state and is left out: on Hopper the warps that compute its first tile wait
    forever for the ones that load it, which load as many tiles as the sequence has.
    """
    states = state(inputs, len(tensor(inputs, "cu_seqlens")) - 1)
    rows, bounds = with_tokens(inputs)
    if not tensor(inputs, "q").shape[0]:
        return {"output": torch.empty_like(tensor(inputs, "v")), "new_state": states}
    carried = states[rows]
    output, after = api["gdn_prefill"](
        tensor(inputs, "q"),
        tensor(inputs, "k"),
        tensor(inputs, "v"),
        g=torch.exp(log_decay(inputs)),
        beta=beta(inputs),
        scale=scale(inputs),
        initial_state=carried,
        output_final_state=True,
        cu_seqlens=bounds,
        output_state=torch.empty_like(carried),
    )
    states[rows] = after
    return {"output": output, "new_state": states}


ADAPTERS = (
    Adapter(
        "gdn_decode.gated_delta_rule_decode_pretranspose",
        DECODE,
        _decode,
        ("gdn_decode",),
        accepts=lambda definition: is_form(definition, Form.DECODE) and _wide(definition),
        packages=("cutlass",),
        sm=HOPPER_UP,
    ),
    Adapter(
        "gdn_decode.gated_delta_rule_mtp",
        MTP,
        _mtp,
        ("gdn_mtp",),
        accepts=_wide,
        packages=("cutlass",),
        sm=HOPPER_UP,
    ),
    Adapter(
        "gdn_prefill.chunk_gated_delta_rule",
        PREFILL,
        _prefill,
        ("gdn_prefill",),
        accepts=_wide,
        modules=lambda _, capability: (PREFILL_SM90,) if capability == (9, 0) else (),
        sm=HOPPER_UP,
    ),
)
