"""What adapters of the gated delta rule share: the gates, the states, and which form a definition has."""

from typing import Any

import torch
from torch.nn import functional

from traceproof.ops.adapter import Api, Outputs, Values, tensor


def log_decay(inputs: Values) -> torch.Tensor:
    """Natural logarithm of the decay, float32, shaped like `a`."""
    a, bias = tensor(inputs, "a").float(), tensor(inputs, "dt_bias").float()
    return -torch.exp(tensor(inputs, "A_log").float()) * functional.softplus(a + bias)


def beta(inputs: Values) -> torch.Tensor:
    """The update's rate, float32, shaped like `b`."""
    return torch.sigmoid(tensor(inputs, "b").float())


def scale(inputs: Values) -> float:
    """The scale; None and 0 stand for 1 / sqrt(K)."""
    given = inputs["scale"]
    value = float(given) if given is not None else 0.0
    return value or tensor(inputs, "q").shape[-1] ** -0.5


def with_tokens(inputs: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the sequences that have tokens, and their bounds.

    SGLang's kernels number chunks by the sequences that have one, so an empty sequence would shift all after it;
    FlashInfer's kernel never ends where one is empty.
    """
    bounds = tensor(inputs, "cu_seqlens")
    rows = torch.nonzero(bounds[1:] > bounds[:-1]).flatten()
    return rows, torch.cat([bounds[:1], bounds[1:][rows]])


def state(inputs: Values, rows: int) -> torch.Tensor:
    """A fresh copy of the state [rows, value heads, V, K], zeros where there is none."""
    given = inputs.get("state")
    if isinstance(given, torch.Tensor):
        return given.clone()
    v, k = tensor(inputs, "v"), tensor(inputs, "k")
    shape = (rows, v.shape[-2], v.shape[-1], k.shape[-1])
    return torch.zeros(shape, dtype=torch.float32, device=v.device)


def turned(states: torch.Tensor, *, flipped: bool) -> torch.Tensor:
    """States [.., V, K] as a kernel has them: [.., K, V] where it wants them flipped; and the way back."""
    return states.transpose(-1, -2).contiguous() if flipped else states


def arguments(inputs: Values) -> dict[str, Any]:
    """What FLA's functions and SGLang's copies of them take alike, by keyword."""
    tensors = {name: tensor(inputs, name) for name in ("q", "k", "v")}
    gates = {"g": log_decay(inputs), "beta": beta(inputs)}
    return {**tensors, **gates, "scale": scale(inputs), "use_qk_l2norm_in_kernel": False}


def in_one_row(inputs: Values) -> dict[str, Any]:
    """The same with the tokens of all sequences in one row, [1, tokens, heads, ...]."""
    given = arguments(inputs)
    return {name: value[None] if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def recurrent(
    api: Api, inputs: Values, states: torch.Tensor, *, flipped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FLA's recurrent kernel, also in SGLang's copy: output, and the states after it."""
    output, after = api["recurrent"](
        **arguments(inputs), initial_state=turned(states, flipped=flipped), output_final_state=True
    )
    return output, turned(after, flipped=flipped)


def by_token(api: Api, inputs: Values, *, flipped: bool) -> Outputs:
    """Decode and multi-token prediction by that kernel; the latter's states are slots of a pool."""
    if "initial_state_indices" not in inputs:
        output, after = recurrent(api, inputs, state(inputs, tensor(inputs, "q").shape[0]), flipped=flipped)
        return {"output": output, "new_state": after}
    pool, slots = tensor(inputs, "initial_state").clone(), tensor(inputs, "initial_state_indices").long()
    output, after = recurrent(api, inputs, pool[slots], flipped=flipped)
    pool[slots] = after
    return {"output": output, "final_state": pool}
