"""The gated delta rule, token by token, over any number of sequences at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from traceproof.ops.common.quant import Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All tokens of all sequences, one after another."""

    q: torch.Tensor  # [tokens, query heads, K]
    k: torch.Tensor  # [tokens, query heads, K]
    # [tokens, value heads, V]; value head h belongs to query head h // (value heads / query heads)
    v: torch.Tensor
    decay: torch.Tensor  # [tokens, value heads], what is left of the state
    rate: torch.Tensor  # [tokens, value heads], how much of the error is corrected
    scale: float  # factor of the output


def recur(
    tokens: Tokens, *, starts: Sequence[int], lengths: Sequence[int], state: torch.Tensor, rounding: Rounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run every sequence from its state; gives outputs [tokens, value heads, V], and final states.

    With S the state [V, K], decayed: S += rate * (v - S k) k^T, then output = scale * S q. A sequence without
    tokens keeps its state. States are [sequences, value heads, V, K], and not modified.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # running sequences are a prefix
    first = torch.tensor([starts[index] for index in order], dtype=torch.int64, device=state.device)
    running = [lengths[index] for index in order]
    place = torch.tensor(order, dtype=torch.int64, device=state.device)
    current = state[place]
    output = torch.zeros_like(tokens.v)
    for step in range(max(lengths, default=0)):
        count = sum(length > step for length in running)
        at = first[:count] + step
        output[at] = _advance(tokens, at, current[:count], rounding)
    final = torch.empty_like(current)
    final[place] = current
    return output, final


def _advance(tokens: Tokens, at: torch.Tensor, state: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Advance `state` [n, heads, V, K] in place by the tokens `at`; their outputs, [n, heads, V]."""
    count, heads, value_size, key_size = state.shape
    shared = heads // tokens.q.shape[1]
    q, k = (x[at].repeat_interleave(shared, dim=1).reshape(-1, key_size, 1) for x in (tokens.q, tokens.k))
    v = tokens.v[at].reshape(-1, value_size, 1)
    flat = state.view(-1, value_size, key_size)
    flat *= tokens.decay[at].reshape(-1, 1, 1)
    correction = tokens.rate[at].reshape(-1, 1, 1) * (v - rounding(flat) @ k)
    flat.baddbmm_(rounding(correction), k.transpose(1, 2))
    return (tokens.scale * (rounding(flat) @ q)).view(count, heads, value_size)
