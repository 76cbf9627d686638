"""Answers of moe_routing."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.formula import Wide, by

Weights = Callable[[torch.Tensor], torch.Tensor]


def _count(wide: Wide) -> int:
    return wide.definition.const_axes[(wide.definition.outputs["topk_ids"].shape or ("", ""))[1]]


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, -1)


def _answer(name: str, weights: Weights = _softmax, *, after: Weights | None = None) -> Answer:
    """The k best of some weights of logits; `after` is applied to the chosen ones' weights."""

    def formula(wide: Wide) -> Tensors:
        best, experts = weights(wide["router_logits"]).topk(_count(wide), -1)
        best = best if after is None else after(best)
        if wide.number("renormalize"):
            best = best / best.sum(-1, keepdim=True)
        return {"topk_weights": best, "topk_ids": experts}

    return by(name, formula)


def _of_the_best(wide: Wide) -> Tensors:
    """Softmax over the chosen logits alone: the same where weights sum to 1."""
    best, experts = wide["router_logits"].topk(_count(wide), -1)
    return {"topk_weights": torch.softmax(best, -1), "topk_ids": experts}


def _if(sums: int, formula: Callable[[Wide], Tensors]) -> Callable[[Wide], Tensors | None]:
    """A way for definitions whose weights sum to 1 (1), or do not (0)."""
    return lambda wide: formula(wide) if wide.number("renormalize") == sums else None


def _worst(wide: Wide) -> Tensors:
    found = _softmax(wide["router_logits"]).topk(_count(wide), -1, largest=False)
    return {"topk_weights": found.values / found.values.sum(-1, keepdim=True), "topk_ids": found.indices}


def _plain(wide: Wide) -> Tensors:
    found = _softmax(wide["router_logits"]).topk(_count(wide), -1)
    return {"topk_weights": found.values, "topk_ids": found.indices}


def _unpaired(wide: Wide) -> Tensors:
    """The right experts, the weights in the opposite order."""
    best, experts = _softmax(wide["router_logits"]).topk(_count(wide), -1)
    best = best / best.sum(-1, keepdim=True) if wide.number("renormalize") else best
    return {"topk_weights": best.flip(-1), "topk_ids": experts}


def _next(wide: Wide) -> Tensors:
    """The second best and those after it."""
    best, experts = _softmax(wide["router_logits"]).topk(_count(wide) + 1, -1)
    best = best[:, 1:] / best[:, 1:].sum(-1, keepdim=True)
    return {"topk_weights": best, "topk_ids": experts[:, 1:]}


ANSWERS = Answers(
    right=(
        _answer("by PyTorch"),
        _answer("powers of two", lambda logits: torch.softmax(logits.double(), -1).float()),
        by("softmax over the chosen", _if(1, _of_the_best)),
    ),
    wrong=(
        by("softmax over the chosen, summing to 1", _if(0, _of_the_best)),
        _answer("sigmoid", torch.sigmoid),
        _answer("logits as weights", lambda logits: logits),
        _answer("weights in bfloat16", after=lambda best: best.bfloat16().float()),
        by("sums not brought to 1", _if(1, _plain)),
        by("the worst experts", _worst),
        by("weights in the opposite order", _unpaired),
        by("the best expert left out", _next),
        _answer("halves of the logits", lambda logits: _softmax(logits / 2)),
    ),
)
