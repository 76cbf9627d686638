"""Quantisers: rows to fp8 and int8 with a scale per block, and fp8 rows back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from traceproof.lazy import torch
from traceproof.ops.adapter import SM89, Api, Definition, Given, Outputs, dim
from traceproof.ops.base import Tensors, rounded
from traceproof.ops.cases import SEEN
from traceproof.ops.compare import Close, Comparison, Exact
from traceproof.ops.families.blockscaled import GATES, MUTANTS, NEAR, Over, around, ones, peak, quotient
from traceproof.ops.formats import E4M3, FP8_MAX, in_blocks, to_fp8
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, same
from traceproof.ops.lossless import full, whole
from traceproof.ops.op import LARGE_AND_SMALL, Op

if TYPE_CHECKING:
    from traceproof.draw import Draw

INT8_MAX = 127.0
REASON = "right kernels differ where a value lies midway between two codes; cutting off errs twice as much"


# quantize_fp8, quantize_int8


OF_SCALES = {"peaks", "scales", "over"}  # parameters of mutants that every quantiser has
WRONG_SCALES: Mapping[str, Part] = {
    "one scale for all": lambda scale: scale.amax().expand(scale.shape) if scale.numel() else scale,
    "scale inverted": lambda scale: 1 / scale,
    "scale 2 per cent too large": lambda scale: scale * 1.02,
    "scale in bfloat16": lambda scale: scale.bfloat16().float(),
    "blocks' scales shifted": lambda scale: scale.roll(1, 1),
}


def quantiser(op_type: str, largest: float, codes: Comparison, *, to_code: Part, cut: Part) -> Op:
    """The op of a format: `largest` value, comparison of `codes`, rounding `to_code`, and truncation `cut`."""

    def quantise(
        wide: Wide,
        *,
        peaks: Part = peak,
        scale_of_peak: Part = lambda peaks: peaks / largest,
        scales: Part = same,
        over: Over = quotient,
        code: Part = same,
    ) -> Tensors:
        """`q = x / scale` [n h], with scale = max|block| / largest [n g] for g blocks per row; 0 of 0s."""
        x = wide["x"]
        blocks = in_blocks(x, x.shape[1] // (dim(wide.definition, "scale", 1) or 1))
        scale = scales(scale_of_peak(peaks(blocks)))
        empty = blocks.abs().amax(-1) == 0  # kernels divide by a least scale, or leave 0
        shares = torch.where(empty[..., None], 0.0, over(blocks, scale[..., None])).reshape(x.shape)
        outputs = {"q": code(shares), "scale": scale, "scale@free": empty}
        if isinstance(codes, Exact) and wide.dtype == torch.float64:
            outputs["q@low"], outputs["q@high"] = around(shares, NEAR * shares.abs())
        return outputs

    def to_codes(values: torch.Tensor) -> torch.Tensor:
        return to_code(values.clamp(-largest, largest))

    def peaked(draw: Draw, wanted: Wanted) -> torch.Tensor:
        """Multiples of 1/2, each fourth of them the format's largest value, so that all scales are 1."""
        value = whole(2 * int(largest))(draw, wanted) / 2
        value[:, ::4] = largest
        return value

    return Op(
        op_type,
        Form("x[n h] -> q[n h] scale[n g]", quantise),
        least_outputs=2,
        family="quantisation",
        where="h % g == 0",
        gates={"q": codes, "scale": Close()},
        # where scales are free they may be any number, but not NaN or infinite
        follows={"scale": ("scale", lambda made, _, of: {**of, "free": of["free"] & made.isfinite()})},
        unusual={**LARGE_AND_SMALL, SEEN: ()},  # kernels drop NaN in the largest magnitude
        roundings={"scale": 4.0},  # a quotient, or a reciprocal and a product
        lossless={"x": peaked},
        exact_on_gpu=lambda _: False,  # kernels may multiply by an inexact reciprocal
        mutants=(
            *(
                Mutant(one.name, code=to_codes, **one.changes)
                for one in MUTANTS
                if one.changes.keys() <= OF_SCALES
            ),
            *(Mutant(name, code=to_codes, scales=change) for name, change in WRONG_SCALES.items()),
            Mutant("cut off", code=lambda values: cut(values.clamp(-largest, largest))),
        ),
    )


def cut_fp8(values: torch.Tensor) -> torch.Tensor:
    """A mutant's rounding: the next fp8 code toward zero, in float32."""
    nearest = values.to(torch.float8_e4m3fn)
    smaller = (nearest.view(torch.uint8) - 1).view(torch.float8_e4m3fn)
    return torch.where(nearest.float().abs() > values.abs(), smaller.float(), nearest.float())


QUANTIZE_FP8 = quantiser("quantize_fp8", FP8_MAX, GATES[E4M3], to_code=to_fp8, cut=cut_fp8)
QUANTIZE_INT8 = quantiser(
    "quantize_int8",
    INT8_MAX,
    Close(factor=1.1, reason=REASON),
    to_code=lambda values: values.round(),
    cut=lambda values: values.trunc(),
)
AMAX = "torch:amax"
ROW_KERNEL = "sgl_kernel:sgl_per_token_quant_fp8"


@QUANTIZE_FP8.truth(
    "sglang",
    "sgl_per_token_quant_fp8",
    ROW_KERNEL,
    # each row has one scale, and a multiple of 8 columns
    accepts=lambda one: dim(one, "scale", 1) == 1 and (dim(one, "x", 1) or 1) % 8 == 0,
    packages=("sgl_kernel",),
    sm=SM89,
)
def _sglang_fp8(api: Api, _: Definition, inputs: Given) -> Outputs:
    x = inputs["x"]
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    api[ROW_KERNEL](x, q, scale)
    return {"q": q, "scale": scale}


@QUANTIZE_FP8.truth("torch", "amax", AMAX, rows=None)
@QUANTIZE_INT8.truth("torch", "amax", AMAX, rows=None)
def _pytorch_quantiser(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """In float32; a block's scale is its largest magnitude over the format's largest value."""
    x, count = inputs["x"].float(), dim(definition, "scale", 1) or 1
    whole = definition.outputs["q"].dtype == "int8"
    blocks = x.reshape(len(x), count, x.shape[1] // count)
    scale = api[AMAX](blocks.abs(), -1, keepdim=True) / (127.0 if whole else 448.0)
    q = torch.where(scale > 0, blocks / scale, 0.0).reshape(x.shape)
    return rounded(definition, {"q": q.round() if whole else q, "scale": scale.squeeze(-1)})


# dequantize_fp8


def per_value(scale: torch.Tensor, width: int) -> torch.Tensor:
    """The scale of each value, [n, g * width], from scales [n, g] of blocks of `width` values."""
    return scale.repeat_interleave(width, 1)


def dequantise(
    wide: Wide,
    *,
    scales: Callable[[torch.Tensor, int], torch.Tensor] = per_value,  # [n g] and a block's width -> [n h]
    as_int8: bool = False,
) -> Tensors:
    """`y = q * scale` [n h], scales [n g] of blocks; mutants have other `scales`, or read q as int8."""
    q = wide.given("q").view(torch.int8).to(wide.dtype) if as_int8 else wide["q"]
    scale = wide["scale"]
    return {"y": q * scales(scale, q.shape[1] // scale.shape[1])}


def any_code(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Random fp8 values, any but NaN."""
    return draw.bits(wanted.name, wanted.shape, torch.float8_e4m3fn)


def over_powers(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Scales from 2**-9 to 2, a power of two times a number in [1, 2); times the case's `scale`."""
    powers = draw.integers(f"{wanted.name}.power", wanted.shape, torch.int32, low=-9, high=1)
    scale = torch.ldexp(draw.uniform(wanted.name, wanted.shape, low=1.0, high=2.0), powers)
    return scale * float(wanted.params.get("scale", 1.0))


DEQUANTIZE_FP8 = Op(
    "dequantize_fp8",
    Form("q[n h] scale[n g] -> y[n h]", dequantise),
    family="quantisation",
    where="h % g == 0",
    draws={"q": any_code, "scale": over_powers},
    lossless={"q": any_code, "scale": full(1, signed=False)},
    adversarial={"tiny": {"scale": 2.0**-40}, "large": {"scale": 2.0**40}},
    mutants=(
        Mutant("scale dropped", scales=lambda scale, width: ones(per_value(scale, width))),
        Mutant("divided by the scale", scales=lambda scale, width: 1 / per_value(scale, width)),
        Mutant("one block's scale for the row", scales=lambda scale, _: scale[:, :1]),
        Mutant("blocks of neighbours", scales=lambda scale, width: scale.repeat(1, width)),
        Mutant("blocks in the opposite order", scales=lambda scale, width: per_value(scale.flip(1), width)),
        *(
            Mutant(name, scales=lambda scale, width, rounding=rounding: per_value(rounding(scale), width))
            for name, rounding in {
                "scale rounded to a power of two": lambda scale: torch.exp2(scale.log2().round()),
                "scale in fp8": lambda scale: scale.to(torch.float8_e4m3fn).float(),
            }.items()
        ),
        Mutant("codes read as whole numbers", as_int8=True),
    ),
)
MULTIPLIED = "torch:mul"


@DEQUANTIZE_FP8.truth("torch", "mul", MULTIPLIED, rows=None)
def _pytorch_rows(api: Api, definition: Definition, inputs: Given) -> Outputs:
    q, scale = inputs["q"].float(), inputs["scale"]
    return rounded(definition, {"y": api[MULTIPLIED](q, scale.repeat_interleave(q.shape[1] // scale.shape[1], 1))})
