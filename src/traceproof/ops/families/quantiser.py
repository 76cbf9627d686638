"""Quantisers: rows to fp8 and int8 with a scale per block, and fp8 rows back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from traceproof.lazy import torch
from traceproof.ops.adapter import SM89, Api, Definition, Given, Outputs, dim, dtype_of
from traceproof.ops.base import Tensors
from traceproof.ops.compare import Close
from traceproof.ops.families.blockscaled import MUTANTS, Over, peak, quotient
from traceproof.ops.formats import FP8_MAX, in_blocks, scale_blocks, to_fp8
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, same
from traceproof.ops.lossless import full, whole
from traceproof.ops.op import Op

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


def quantiser(op_type: str, largest: float, codes: Close, *, to_code: Part, cut: Part) -> Op:
    """The op of a format: `largest` value, comparison of `codes`, rounding `to_code`, and truncation `cut`."""

    def quantise(
        wide: Wide,
        *,
        peaks: Part = peak,
        wanted: Part = lambda peaks: peaks / largest,
        scales: Part = same,
        over: Over = quotient,
        code: Part = same,
    ) -> Tensors:
        """`q = x / scale` [n h], with scale = max|block| / largest [n g] for g blocks per row."""
        x, spec = wide["x"], wide.definition.outputs["scale"]
        blocks = in_blocks(x, x.shape[1] // wide.definition.const_axes[(spec.shape or ("", ""))[1]])
        scale = scales(wanted(peaks(blocks)))
        return {"q": code(over(blocks, scale[..., None])).reshape(x.shape), "scale": scale}

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return to_code(values.clamp(-largest, largest))

    def peaked(draw: Draw, wanted: Wanted) -> torch.Tensor:
        """Multiples of 1/2, each fourth of them the format's largest value, so that all scales are 1."""
        value = whole(2 * int(largest))(draw, wanted) / 2
        value[:, ::4] = largest
        return value

    return Op(
        op_type,
        Form("x[n h] -> q[n h] scale[n g]", quantise),
        family="quantisation",
        gates={"q": codes, "scale": Close()},
        roundings={"scale": 4.0},  # a quotient, or a reciprocal and a product
        lossless=lambda _: {"x": peaked},
        exact_on_gpu=lambda _: False,  # kernels may multiply by an inexact reciprocal
        mutants=(
            *(Mutant(one.name, code=rounded, **one.changes) for one in MUTANTS if one.changes.keys() <= OF_SCALES),
            *(Mutant(name, code=rounded, scales=change) for name, change in WRONG_SCALES.items()),
            Mutant("cut off", code=lambda values: cut(values.clamp(-largest, largest))),
        ),
    )


def cut_fp8(values: torch.Tensor) -> torch.Tensor:
    """A mutant's rounding: the next fp8 code toward zero, in float32."""
    near = values.to(torch.float8_e4m3fn)
    below = (near.view(torch.uint8) - 1).view(torch.float8_e4m3fn)
    return torch.where(near.float().abs() > values.abs(), below.float(), near.float())


QUANTIZE_FP8 = quantiser("quantize_fp8", FP8_MAX, Close(rms=0.035, reason=REASON), to_code=to_fp8, cut=cut_fp8)
QUANTIZE_INT8 = quantiser(
    "quantize_int8",
    INT8_MAX,
    Close(factor=1.1, reason=REASON),
    to_code=lambda values: values.round(),
    cut=lambda values: values.trunc(),
)
AMAX = "torch:amax"
ROW_KERNEL = "sgl_kernel:sgl_per_token_quant_fp8"


def per_token(definition: Definition) -> bool:
    """Whether each row has one scale, and a multiple of 8 columns, as SGLang's kernel takes."""
    shape = definition.outputs["scale"].shape or ("", "")
    hidden = dim(definition, "x", 1)
    return definition.const_axes.get(shape[1]) == 1 and hidden is not None and hidden % 8 == 0


@QUANTIZE_FP8.truth(
    "sglang",
    "sgl_per_token_quant_fp8",
    ROW_KERNEL,
    accepts=per_token,
    packages=("sgl_kernel",),
    sm=SM89,
)
def _sglang_fp8(api: Api, _: Definition, inputs: Given) -> Outputs:
    x = inputs["x"]
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    api[ROW_KERNEL](x, q, scale)
    return {"q": q, "scale": scale}


def scaled_by_block(
    api: Api, definition: Definition, inputs: Given, format_max: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x / scale`, unrounded [rows, columns], and scale = max|block| / format_max [rows, blocks], both float32."""
    x, shape = inputs["x"].float(), definition.outputs["scale"].shape or ()
    count = definition.const_axes[shape[1]]
    blocks = x.reshape(len(x), count, x.shape[1] // count)
    scale = api[AMAX](blocks.abs(), -1, keepdim=True) / format_max
    return (blocks / scale).reshape(x.shape), scale.squeeze(-1)


@QUANTIZE_FP8.truth("torch", "amax", AMAX, rows=None)
def _pytorch_fp8(api: Api, definition: Definition, inputs: Given) -> Outputs:
    values, scale = scaled_by_block(api, definition, inputs, 448.0)
    return {"q": values.to(torch.float8_e4m3fn), "scale": scale}


@QUANTIZE_INT8.truth("torch", "amax", AMAX, rows=None)
def _pytorch_int8(api: Api, definition: Definition, inputs: Given) -> Outputs:
    values, scale = scaled_by_block(api, definition, inputs, 127.0)
    return {"q": values.round().to(torch.int8), "scale": scale}


# dequantize_fp8


def spread(scale: torch.Tensor, width: int) -> torch.Tensor:
    """The scale of each value, [n, g * width], from scales [n, g] of blocks of `width` values."""
    return scale.repeat_interleave(width, 1)


def dequantise(
    wide: Wide,
    *,
    scales: Callable[[torch.Tensor, int], torch.Tensor] | None = None,  # [n g] and a block's width -> [n h]
    whole: bool = False,
) -> Tensors:
    """`y = q * scale` [n h], scales [n g] of blocks; mutants have other `scales`, or take q as int8 (`whole`)."""
    q, scale = wide["q"], wide["scale"]
    width = q.shape[1] // scale.shape[1]
    if whole:
        q = wide.given("q").view(torch.int8).to(wide.dtype)
    if scales is None:
        return {"y": scale_blocks(q, scale, height=1, width=width)}
    return {"y": q * scales(scale, width)}


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
    draws={"q": any_code, "scale": over_powers},
    lossless=lambda _: {"q": any_code, "scale": full(1, signed=False)},
    adversarial={"tiny": {"scale": 2.0**-40}, "large": {"scale": 2.0**40}},
    mutants=(
        Mutant("scale dropped", scales=lambda scale, width: torch.ones_like(spread(scale, width))),
        Mutant("divided by the scale", scales=lambda scale, width: 1 / spread(scale, width)),
        Mutant(
            "one block's scale for the row",
            scales=lambda scale, width: scale[:, :1].expand(-1, width * scale.shape[1]),
        ),
        Mutant("blocks of neighbours", scales=lambda scale, width: scale.repeat(1, width)),
        Mutant("blocks in the opposite order", scales=lambda scale, width: spread(scale.flip(1), width)),
        Mutant(
            "scale rounded to a power of two",
            scales=lambda scale, width: torch.exp2(spread(scale, width).log2().round()),
        ),
        Mutant("scale in fp8", scales=lambda scale, width: spread(scale.to(torch.float8_e4m3fn).float(), width)),
        Mutant("codes read as whole numbers", whole=True),
    ),
)
MULTIPLIED = "torch:mul"


@DEQUANTIZE_FP8.truth("torch", "mul", MULTIPLIED, rows=None)
def _pytorch_rows(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """In float32, rounded once."""
    q, scale = inputs["q"].float(), inputs["scale"]
    y = api[MULTIPLIED](q, scale.repeat_interleave(q.shape[1] // scale.shape[1], 1))
    return {"y": y.to(dtype_of(definition.outputs["y"]))}
