"""Attention of one request, its keys and values in one piece: causal or not, window, soft cap, sinks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.answers import Answer, Answers
from traceproof.ops.base import TORCH_DTYPES, Tensors, Value
from traceproof.ops.cases import STRESS, Case
from traceproof.ops.common.attention_inputs import Style
from traceproof.ops.formula import FormulaOp, Wide, by

SCALARS = {"sm_scale": 0.125, "logits_soft_cap": 4.0, "window_left": 7}
CASES = {"large": {"scale": 3.0}, "offset": {"offset": 1.0}, "outlier": {"outlier": 20.0}}


@dataclass(frozen=True, slots=True)
class Ways:
    """Which parts of the formula are taken otherwise than they should; the defaults are right."""

    causal: bool = True
    shift: int = 0  # of the diagonal. window: of its left end. groups: how query heads share key heads.
    window: int = 0
    scale: float = 1.0
    capped: bool = True
    sinks: bool = True
    interleaved: bool = False
    dropped: int = 0
    # dtype that the weights are rounded to before they meet the values; None: that of the formula
    weights: torch.dtype | None = None


RIGHT = Ways()


def attend(wide: Wide, ways: Ways = RIGHT) -> torch.Tensor:
    """Attention of queries [n h d] over keys [l g d], values [l g e]: [n h e].

    Query i stands at l - n + i. A definition is causal if its reference says CAUSAL = 1; a window keeps that many
    keys before the query's own; a soft cap bends logits; a sink is one more logit per head, without a value. In
    float32 the weights are rounded to bfloat16, as kernels do.
    """
    q, k, v = wide["q"], wide["k"], wide["v"]
    count, heads, length = q.shape[0], q.shape[1], k.shape[0]
    group = torch.arange(heads, device=q.device)
    group = group % k.shape[1] if ways.interleaved else group // (heads // k.shape[1])
    logits = torch.einsum("nhd,lhd->hnl", q, k[:, group])
    logits = logits * (wide.number("sm_scale", 1 / math.sqrt(q.shape[-1])) * ways.scale)
    if "logits_soft_cap" in wide and ways.capped:
        cap = wide.number("logits_soft_cap")
        logits = cap * torch.tanh(logits / cap)
    place = torch.arange(count, device=q.device)[:, None] + (length - count) + ways.shift
    key = torch.arange(length, device=q.device)[None]
    hidden = torch.zeros((count, length), dtype=torch.bool, device=q.device)
    if wide.number("causal", 0.0) and ways.causal:
        hidden |= key > place
    if "window_left" in wide:
        hidden |= key < place - int(wide.number("window_left")) - ways.window
    hidden |= key >= length - ways.dropped
    logits = logits.masked_fill(hidden, -math.inf)
    top = logits.amax(-1, keepdim=True).clamp_min(-1e30)
    weights = torch.exp(logits - top)
    total = weights.sum(-1)
    if "sinks" in wide and ways.sinks:
        total = total + torch.exp(wide["sinks"][:, None] - top.squeeze(-1))
    low = ways.weights or (torch.bfloat16 if wide.dtype is torch.float32 else wide.dtype)
    mixed = torch.einsum("hnl,lhe->nhe", weights.to(low).to(wide.dtype), v[:, group])
    total = torch.where(total == 0, torch.ones_like(total), total)
    return mixed / total.T.unsqueeze(-1)


def _blocks(wide: Wide) -> torch.Tensor:
    """Keys in two halves, merged by their sums, where nothing but the keys' number tells them apart."""
    q, k, v = wide["q"], wide["k"], wide["v"]
    group = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    logits = torch.einsum("nhd,lhd->hnl", q, k[:, group]) * wide.number("sm_scale", 1 / math.sqrt(q.shape[-1]))
    parts = []
    for part, values in zip(torch.split(logits, 16, -1), torch.split(v[:, group], 16), strict=True):
        top = part.amax(-1, keepdim=True)
        weights = torch.exp(part - top)
        parts.append((torch.einsum("hnl,lhe->nhe", weights, values), top.squeeze(-1).T, weights.sum(-1).T))
    top = torch.stack([part[1] for part in parts]).amax(0)
    factors = [torch.exp(part[1] - top) for part in parts]
    mixed = sum(part[0] * factor.unsqueeze(-1) for part, factor in zip(parts, factors, strict=True))
    total = sum(part[2] * factor for part, factor in zip(parts, factors, strict=True))
    assert isinstance(mixed, torch.Tensor)
    assert isinstance(total, torch.Tensor)
    return mixed / total.unsqueeze(-1)


class SingleOp(FormulaOp):
    """Attention of one request."""

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Raw products of queries and keys beyond what masks have been filled with."""
        plain = next(iter(self.cases(definition, sizes=("medium",), seed=seed)))
        for pattern in ("below", "above"):
            drawing = {"pattern": pattern, "amplitude": 1.0}
            yield Case(f"stress-{pattern}", STRESS, plain.axes, seed, drawing)

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """One input; queries and keys in the case's pattern, if it has one."""
        shape = definition.shape_of(spec, case.axes)
        if "pattern" not in case.params or name not in {"q", "k"} or shape is None:
            return super().value(definition, name, spec, case, draw)
        style, dtype = Style.of(case, width=shape[-1], scale=1.0), TORCH_DTYPES[spec.dtype]
        if name == "q":
            return style.tensor(draw, name, shape, dtype)
        return style.keys(draw, name, shape, dtype, outlier=False)


PLAIN = frozenset({"q", "k", "v", "sm_scale"})


def answers(*further: Answer) -> Answers:
    """Answers of an op that `attend` says, and further wrong ones."""

    def way(name: str, ways: Ways, *, needs: str = "") -> Answer:
        def formula(wide: Wide) -> Tensors | None:
            applies = not needs or needs in wide or (needs == "causal" and bool(wide.number("causal", 0.0)))
            return {"output": attend(wide, ways)} if applies else None

        return by(name, formula)

    def split(wide: Wide) -> Tensors | None:
        plain = wide.values.keys() <= PLAIN and not wide.number("causal", 0.0)
        return {"output": _blocks(wide)} if plain else None

    return Answers(
        right=(
            way("float32, weights in bfloat16", RIGHT),
            way("float32 throughout", Ways(weights=torch.float32)),
            by("keys in blocks", split),
        ),
        wrong=(
            way("scale dropped", Ways(scale=2.0)),
            way("scale squared", Ways(scale=0.5)),
            way("heads interleaved", Ways(interleaved=True)),
            way("last key dropped", Ways(dropped=1)),
            way("mask dropped", Ways(causal=False), needs="causal"),
            way("diagonal one further", Ways(shift=1), needs="causal"),
            way("diagonal one before", Ways(shift=-1), needs="causal"),
            way("window one longer", Ways(window=1), needs="window_left"),
            way("window one shorter", Ways(window=-1), needs="window_left"),
            way("soft cap dropped", Ways(capped=False), needs="logits_soft_cap"),
            way("sinks dropped", Ways(sinks=False), needs="sinks"),
            *further,
        ),
    )
