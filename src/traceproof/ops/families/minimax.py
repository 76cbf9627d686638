"""MiniMax-H3's fused steps before attention: norms, modulation, projection, rotation, packing by rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.ops.adapter import dim
from traceproof.ops.base import Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.families import blockscaled
from traceproof.ops.families.blockscaled import MXFP8, NVFP4, Scheme
from traceproof.ops.families.norm import mean_square
from traceproof.ops.families.rotary import cos_sin_drawn
from traceproof.ops.formats import swizzle, swizzled_size, to_bf16
from traceproof.ops.formula import Form, Mutant, Part, Wide, altered, same
from traceproof.ops.gates import silu
from traceproof.ops.lossless import full, one_hot
from traceproof.ops.op import LARGE_AND_SMALL, Op

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.draw import Draw

KINDS = 3  # queries, keys, values


def by_rank(parts: torch.Tensor, ranks: int) -> torch.Tensor:
    """Rows [m, heads, kinds, d] as each rank gets them, [ranks, m, heads / ranks, kinds, d]."""
    return parts.view(len(parts), ranks, -1, *parts.shape[2:]).transpose(0, 1)


def pre_attention(
    wide: Wide, *, shifted: float = 1.0, offset: float = 1.0, rotated: Part = same, mixed: bool = False
) -> Tensors:
    """Queries, keys and values by rank, as `by_rank` has them, of `a = rmsnorm(x) w (1 + scale[i]) + shift[i]`.

    `a` is projected by weights with rows by kind, head and channel; queries and keys are normed, and channel d is
    rotated with d + half of the rotated ones. In float32 each stage is rounded to bfloat16. Mutants change the
    factor `shifted`, the scale's `offset` or the angles (`rotated`), or take rows by head, then kind (`mixed`).
    """
    rounding = same if wide.dtype is torch.float64 else to_bf16
    eps, row = wide.number("eps"), wide["adaln_index"].long()
    x = wide["x"]
    normed = rounding(x / torch.sqrt(mean_square(x) + eps) * wide["x_norm_weight"])
    scale = rounding(offset + wide["adaln_scale"][row])
    active = rounding(normed * scale + shifted * wide["adaln_shift"][row])
    width = wide["q_norm_weight"].numel()
    products = rounding(active @ wide["qkv_weight"].T)
    parts = products.view(len(x), KINDS, -1, width)
    if mixed:
        parts = products.view(len(x), -1, KINDS, width).transpose(1, 2)
    table, place = wide["rope_cos_sin"], wide.maybe("rope_positions")
    place = torch.arange(len(x), device=x.device) if place is None else place.long().clamp(0, len(table) - 1)
    cos, sin = rotated(table[place])[:, None].chunk(2, -1)
    half, turned = cos.shape[-1], []
    for at, name in enumerate("qk"):
        vectors = parts[:, at]
        vectors = (
            vectors / torch.sqrt(mean_square(vectors) + wide.number("qk_eps", eps)) * wide[f"{name}_norm_weight"]
        )
        left, right, rest = rounding(vectors).tensor_split([half, 2 * half], -1)
        turned.append(torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1))
    ranks = int(wide.number("ulysses_degree"))
    return {"out_out": by_rank(torch.stack([*turned, parts[:, 2]], 2), ranks)}


class PreAttention(Op):
    """The op, whose number of ranks is both an axis and the input `ulysses_degree`."""

    sizes_in_numbers = ("ulysses_degree",)

    @staticmethod
    def _rows(_: Definition) -> None:
        """None, as the output's first axis is that of ranks, not of rows."""

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Drawn inputs, with the number of ranks that the axis has."""
        sizes, axis = {**case.axes, **definition.const_axes}, self.letters(definition)["u"]
        return super().inputs(definition, case, draw) | {"ulysses_degree": sizes[axis]}

    def smaller(self, definition: Definition, fixed: Collection[str]) -> Mapping[str, int]:
        """A quarter of the channels and heads, if heads are a multiple of 8, so that two ranks can share them."""
        axis = self.letters(definition)
        sizes = {axis[letter]: definition.const_axes.get(axis[letter], 0) for letter in "nwd"}
        heads = sizes[axis["w"]] // (KINDS * sizes[axis["d"]])
        fits = heads % 8 == 0 and sizes.keys().isdisjoint(fixed)
        return {axis[letter]: sizes[axis[letter]] // 4 for letter in "nw"} if fits else {}


PRE_ATTENTION = PreAttention(
    "minimax_h3_bf16_pre_attention",
    Form(
        "x[m n] x_norm_weight[n] adaln_scale[r n] adaln_shift[r n] adaln_index[m] qkv_weight[w n] q_norm_weight[d]"
        " k_norm_weight[d] rope_cos_sin[s z] rope_positions[m]? workspace[m n]? out[u m a c d]? ulysses_degree"
        " eps? qk_eps? -> out_out[u m a c d]",
        pre_attention,
        constants=("eps",),
    ),
    family="minimax",
    independent_rows=False,
    coupled=True,
    scalars={"eps": 1e-5, "qk_eps": 1e-5},
    sizes={
        "m": (1, 3, 4, 16, 5),
        "u": (1, 2),
        "a": lambda size: size["w"] // (KINDS * size["d"] * size["u"]),
        "r": (9,),
        "s": (17,),
    },
    adversarial_inputs=("x",),
    decisive=("x",),  # for its norm and its products
    decisive_sizes={"r": 9, "s": 17, "u": 1},
    draws={
        # weights keep sums near 1
        "qkv_weight": lambda draw, one: draw.normal(one.name, one.shape, scale=one.shape[-1] ** -0.5).to(
            one.dtype
        ),
        "adaln_scale adaln_shift": lambda draw, one: draw.normal(one.name, one.shape, scale=0.25).to(one.dtype),
        "adaln_index": blockscaled.below("adaln_scale"),
        "rope_positions": blockscaled.below("rope_cos_sin"),
        "rope_cos_sin": cos_sin_drawn,
    },
    unread={"workspace out": "it is written over"},
    # Normed values are of equal size, sums have one term: stages are exact in bfloat16, up to the rotation's sum.
    lossless={
        "x": full(20, most=1),
        "x_norm_weight adaln_scale": 1.0,
        "adaln_shift workspace out": 0.0,
        "qkv_weight": lambda draw, wanted: one_hot(draw, wanted) * 2.0**14,
        "q_norm_weight k_norm_weight rope_cos_sin": full(0),
    },
    exact_on_gpu=lambda _: False,
    unusual=dict.fromkeys(("nan", *LARGE_AND_SMALL), ("x",)),
    mutants=(
        Mutant("shift dropped", shifted=0.0),
        Mutant("scale without its one", offset=0.0),
        Mutant("not rotated", rotated=lambda table: torch.cat([torch.ones_like(table), table * 0], -1)[:, ::2]),
        Mutant("rotated the other way", rotated=lambda t: torch.cat([t.chunk(2, -1)[0], -t.chunk(2, -1)[1]], -1)),
        Mutant("weights by head, then kind", mixed=True),
        Mutant("sums in bfloat16", precision="bfloat16"),
        altered("rows of the next token's table", "adaln_index", change=lambda rows: rows.roll(1)),
        altered("norm's weight dropped", "x_norm_weight", change=blockscaled.ones),
        altered("queries' norm for keys", "k_norm_weight", change=blockscaled.ones),
        altered("positions ignored", "rope_positions", change=lambda rows: torch.arange(len(rows))),
        altered("eps x 100", "eps", change=lambda eps: eps * 100),
    ),
)


# minimax_h3_qkv_quantize_pack


def packed(scheme: Scheme, elements: str, *absent: str, **facts: Any) -> Op:  # noqa: ANN401 - an Op's
    """The op that packs queries, keys and values by rank as codes, with all scales of a rank in tiles."""
    inputs = f"q[m h d] k[m h d] v[m h d] out_global_scale[o]? out_q[u m a c {elements}]? out_sf[u s]?"

    def read(wide: Wide, order: Part) -> tuple[torch.Tensor, torch.Tensor | float, None]:
        shape = wide.definition.outputs["out_q_out"].shape or ("",)
        factor = wide.maybe("out_global_scale")
        parts = torch.stack([wide[name] for name in "qkv"], 2)
        rows = by_rank(parts if order is silu else order(parts), wide.definition.const_axes[shape[0]])
        return rows, 1.0 if factor is None else factor, None

    return blockscaled.coded(
        "minimax_h3_qkv_quantize_pack",
        scheme,
        {f"{inputs} -> out_q_out[u m a c {elements}] out_sf_out[u s]": read},
        scales_layout=lambda scales: swizzle(scales.flatten(1, 3)),
        shared={},
        sizes={
            "m": (1, 3, 4, 16, 5),
            "o": (1,),
            "s": lambda at: swizzled_size(at["m"] * at["a"] * at["c"], at["d"] // scheme.width),
        },
        where=f"d % {scheme.width} == 0; h == u * a; c == {KINDS}",
        least_outputs=2,
        requires=lambda one: None if dim(one, next(iter(one.outputs)), 0) else "nobody states the ranks",
        independent_rows=False,
        coupled=True,
        draws={"out_global_scale": blockscaled.between(200.0, 400.0)},
        lossless={"q k v": blockscaled.exact_rows, "out_global_scale": 64.0, "out_q": 0.0},
        unread={"out_q out_sf": "it is written over", **dict.fromkeys(absent, "it is not given")},
        absent=absent,
        exact_on_gpu=lambda _: False,
        **facts,
    )


PACK = packed(
    NVFP4,
    "z",
    family="minimax",
    mutants=(
        *blockscaled.MUTANTS,
        *blockscaled.OF_TENSORS,
        Mutant("scales row by row", linear=True),
        Mutant("values first", act=lambda parts: parts.flip(2)),
        Mutant("heads of the next rank", act=lambda parts: parts.roll(1, 1)),
    ),
    other_forms=(packed(MXFP8, "d", "out_global_scale"),),
)
