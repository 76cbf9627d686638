"""Which experts a token goes to and with what weight, in float64. Ties go to the lowest expert index."""

from dataclasses import dataclass
from enum import StrEnum

import torch

PACKED_SHIFT = 16  # routed form: expert << 16 | bits of the bfloat16 weight


class Method(StrEnum):
    """How weights come about.

    DEEPSEEK: sigmoid; choose by sigmoid + bias, groups first (a group counts the sum of its two best); weights
        are the chosen sigmoids without bias, normalised, times the scaling factor.
    RENORMALISE: choose the largest logits, softmax over the chosen. The same as softmax, choose, renormalise.
    LLAMA4: the largest logit alone, weight sigmoid(logit); a routing bias is not read.
    PACKED: given; FlashInfer's packing of expert and weight in one int32.
    UNIFORM: given as plain expert indices; every one weighs 1 / top_k.
    """

    DEEPSEEK = "deepseek"
    RENORMALISE = "renormalise"
    LLAMA4 = "llama4"
    PACKED = "packed"
    UNIFORM = "uniform"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A routing method and its numbers; one group means no grouping."""

    method: Method
    top_k: int
    groups: int = 1
    top_groups: int = 1

    @property
    def given(self) -> bool:
        """Whether the choice comes in as `topk_ids`."""
        return self.method in {Method.PACKED, Method.UNIFORM}


@dataclass(frozen=True, slots=True)
class Choice:
    """Expert indices int64 [..., top_k] and weights float64 [..., top_k]."""

    experts: torch.Tensor
    weights: torch.Tensor


def choose(routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None, factor: float = 1.0) -> Choice:
    """Route by logits [..., experts] (any float dtype)."""
    logits = logits.to(torch.float64)
    experts = best(_scores(routing, logits, bias), routing.top_k)
    chosen = logits.gather(-1, experts)
    match routing.method:
        case Method.DEEPSEEK:
            plain = torch.sigmoid(chosen)
            weights = plain / plain.sum(-1, keepdim=True) * factor
        case Method.RENORMALISE:
            weights = torch.softmax(chosen, -1) * factor
        case Method.LLAMA4:
            weights = torch.sigmoid(chosen) * factor
        case _:
            raise ValueError(f"{routing.method} is given, not chosen")
    return Choice(experts, weights)


def read(routing: Routing, topk_ids: torch.Tensor) -> Choice:
    """The choice that `topk_ids` (int32 [tokens, top_k]) states."""
    if routing.method == Method.UNIFORM:
        weights = torch.full(topk_ids.shape, 1 / routing.top_k, dtype=torch.float64, device=topk_ids.device)
        return Choice(topk_ids.to(torch.int64), weights)
    weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).to(torch.float64)
    return Choice((topk_ids >> PACKED_SHIFT).to(torch.int64), weights)


def pack(experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int32 `topk_ids` from expert indices and non-negative bfloat16 weights."""
    bits = weights.view(torch.int16).to(torch.int32)
    return (experts.to(torch.int32) << PACKED_SHIFT) | bits


def margins(
    routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None, *, pairs: bool = False
) -> torch.Tensor:
    """How far scores could be off before the choice changes: float64 [...], 0 where it is a matter of luck.

    `pairs`: two scores that tie at the boundary count as one, since their experts are interchangeable.
    """
    logits = logits.to(torch.float64)
    margin = _gap(_scores(routing, logits, bias), routing.top_k, pairs=pairs)
    if routing.top_groups < routing.groups:
        by_group = _group_scores(routing, _biased(logits, bias))
        margin = torch.minimum(margin, _gap(by_group, routing.top_groups, pairs=False))
    return margin


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` best along the last axis, best first; of equals the lowest index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def _biased(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    plain = torch.sigmoid(logits)
    return plain if bias is None else plain + bias.to(torch.float64)


def _group_scores(routing: Routing, scores: torch.Tensor) -> torch.Tensor:
    size = scores.shape[-1] // routing.groups
    grouped = scores.view(*scores.shape[:-1], routing.groups, size)
    return torch.sort(grouped, dim=-1, descending=True).values[..., :2].sum(-1)


def _scores(routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What experts are chosen by; -inf for experts of groups that are out."""
    if routing.method != Method.DEEPSEEK:
        return logits
    scores = _biased(logits, bias)
    kept = best(_group_scores(routing, scores), routing.top_groups)
    mask = torch.zeros((*scores.shape[:-1], routing.groups), dtype=torch.bool, device=scores.device)
    mask.scatter_(-1, kept, value=True)
    size = scores.shape[-1] // routing.groups
    return scores.masked_fill(~mask.repeat_interleave(size, -1), -torch.inf)


def _gap(scores: torch.Tensor, count: int, *, pairs: bool) -> torch.Tensor:
    ranked = torch.sort(scores, dim=-1, descending=True).values
    edge = torch.full_like(ranked[..., :2], torch.inf)
    ranked = torch.cat([edge, ranked, -edge], -1)
    gaps = (ranked[..., :-1] - ranked[..., 1:]).nan_to_num(nan=torch.inf)
    here = count + 1  # between the last one chosen and the next, counting the edge
    gap = gaps[..., here]
    if not pairs:
        return gap
    return torch.where(gap > 0, gap, torch.minimum(gaps[..., here - 1], gaps[..., here + 1]))
