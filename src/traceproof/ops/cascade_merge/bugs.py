"""Answers of cascade_merge."""

import math
from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.cascade_merge.oracle import merged, stacked
from traceproof.ops.formula import Wide, by

Merge = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _states(wide: Wide) -> tuple[torch.Tensor, torch.Tensor]:
    for names in (("v_a", "v_b", "s_a", "s_b"), ("v", "v_other", "s", "s_other")):
        if names[1] in wide:
            return stacked(wide, *names[:2]), stacked(wide, *names[2:])
    return wide["v"], wide["s"]


def _answer(name: str, merge: Merge) -> Answer:
    """What a way of merging gives; rows that a mask leaves out stay."""

    def formula(wide: Wide) -> Tensors:
        v, s = merge(*_states(wide))
        if "mask" in wide:
            kept = wide["mask"].bool()
            v = torch.where(kept[:, None, None], v, wide["v"])
            s = torch.where(kept[:, None], s, wide["s"])
        return dict(zip(wide.definition.outputs, (v, s), strict=True))

    return by(name, formula)


def _in_turn(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One state after the other, as a kernel that streams them does."""
    out, level = v[:, 0], s[:, 0]
    for index in range(1, v.shape[1]):
        top = torch.maximum(level, s[:, index])
        finite = top.clamp_min(torch.finfo(s.dtype).min)
        old, new = torch.exp2(level - finite), torch.exp2(s[:, index] - finite)
        total = torch.where(top > -torch.inf, old + new, 1.0)
        out = (out * old.unsqueeze(-1) + v[:, index] * new.unsqueeze(-1)) / total.unsqueeze(-1)
        level = top + torch.log2(total)
    return out, level


def _natural(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (v * torch.softmax(s, 1).unsqueeze(-1)).sum(1), torch.logsumexp(s, 1)


def _by_softmax(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = s * math.log(2.0)
    weights = torch.softmax(scaled, 1).nan_to_num(0.0).unsqueeze(-1)  # NaN where all states are empty
    return (v * weights).sum(1), torch.logsumexp(scaled.double(), 1).float() / math.log(2.0)


def _mean(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return v.mean(1), merged(v, s)[1]


def _summed(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Not divided by the sum of weights."""
    weights = torch.exp2(s - s.amax(1, keepdim=True)).unsqueeze(-1)
    return (v * weights).sum(1), merged(v, s)[1]


def _unmasked(wide: Wide) -> Tensors | None:
    if "mask" not in wide:
        return None
    return dict(zip(wide.definition.outputs, merged(*_states(wide)), strict=True))


ANSWERS = Answers(
    right=(
        _answer("float32 throughout", merged),
        _answer("one state after the other", _in_turn),
        _answer("softmax", _by_softmax),
    ),
    wrong=(
        _answer("natural logarithms", _natural),
        _answer("weights of natural logarithms", lambda v, s: (_natural(v, s)[0], merged(v, s)[1])),
        _answer("natural logarithm of the sum", lambda v, s: (merged(v, s)[0], merged(v, s)[1] * math.log(2.0))),
        _answer("equal weights", _mean),
        _answer("not divided by the weights", _summed),
        _answer("the largest logarithm alone", lambda v, s: (merged(v, s)[0], s.amax(1))),
        _answer("logarithms added", lambda v, s: (merged(v, s)[0], s.sum(1))),
        _answer("the states' weights exchanged", lambda v, s: (merged(v, s.flip(1))[0], merged(v, s)[1])),
        _answer(
            "overflow",
            lambda v, s: (
                (v * torch.exp2(s).unsqueeze(-1)).sum(1) / torch.exp2(s).sum(1).unsqueeze(-1),
                torch.exp2(s).sum(1).log2(),
            ),
        ),
        _answer("only the first state", lambda v, s: (v[:, 0], s[:, 0])),
        by("mask not looked at", _unmasked),
    ),
)
