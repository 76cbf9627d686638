"""Multi-head latent attention in its absorbed form: one key head, whose first part is the value too."""

import math
from collections.abc import Mapping

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Tensors, Unsupported
from traceproof.ops.cases import Case
from traceproof.ops.common.attention import const_size, float32
from traceproof.ops.common.attention_inputs import POISON, Sequences, Style, lean

# Width of a query's nope part before the up-projection is absorbed into it. The softmax scale is that of the form
# before absorption, 1 / sqrt(128 + 64), and the absorbed form's axes (512 and 64) no longer tell the 128. It is
# 128 in every published model with this attention (DeepSeek V2, V3, V3.2, Kimi K2).
QK_NOPE = 128
DRAWN = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")


def sm_scale(kpe: int) -> float:
    """1 / sqrt(128 + kpe) in float32; models that stretch their context multiply a factor onto it."""
    return float32(1 / math.sqrt(QK_NOPE + kpe))


def style_of(case: Case, *, ckv: int, kpe: int) -> Style:
    """The style of a case, for key parts of these widths."""
    return Style.of(case, width=ckv + kpe, scale=sm_scale(kpe))


def require_widths(definition: Definition) -> None:
    """Check that both parts of a query are as wide as their caches. Raises Unsupported: one is not."""
    for query, cache in (("q_nope", "ckv_cache"), ("q_pe", "kpe_cache")):
        if const_size(definition, query, -1) != const_size(definition, cache, -1):
            raise Unsupported(f"{query} and {cache} differ in their last axis")


def drawn(
    draw: Draw, style: Style, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> Tensors:
    """DRAWN, queries first. The outlier channel stands in kpe: in ckv it would be a value, and hide errors."""
    data = {name: style.tensor(draw, name, shapes[name], dtypes[name]) for name in DRAWN[:2]}
    for name in DRAWN[2:]:
        data[name] = style.keys(draw, name, shapes[name], dtypes[name], outlier=name == "kpe_cache")
    return data


def poison_(ckv: torch.Tensor, unread: torch.Tensor) -> None:
    """Spoil rows of a flattened cache [S, Dckv] in place: one channel at 50.

    One channel and not all: keys and values are the same tensor, and a key of 50s has logits of +-80, where half
    of the heads would give it no weight and not show that they read it.
    """
    ckv[unread, ckv.shape[-1] // 2] = POISON


def queries(  # noqa: PLR0913 - the operands of one formula
    draw: Draw,
    style: Style,
    *,
    nope: torch.Tensor,
    pe: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q_nope [T, H, Dckv] and q_pe [T, H, Dkpe] with their lean to keys of the flattened caches added."""
    leaning = lean(draw, style, sequences, heads=nope.shape[1])
    if leaning is None:
        return nope, pe
    return leaning.added(nope, ckv[:, None]), leaning.added(pe, kpe[:, None])


def keys(ckv: torch.Tensor, kpe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flattened caches [S, Dckv] and [S, Dkpe] as keys [S, 1, Dckv + Dkpe] and values [S, 1, Dckv]."""
    return torch.cat([ckv, kpe], -1)[:, None], ckv[:, None]
