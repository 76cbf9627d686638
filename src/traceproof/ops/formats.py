"""Narrow number formats, exactly: fp4, fp8 and e8m0 codes, block scales, their layouts, and what they cost.

A format is the table of what its codes stand for, all of them exact in float64. Values are encoded to the nearest
code, of two equally near ones the even one, or upward or downward as scales may be. What lies beyond the largest
saturates, or becomes what the format has for it: NaN in e4m3fn, infinity in e5m2; e2m1 has neither. Of e8m0, which
has no sign and no zero, the codes are powers of two, values of 0 and below have none, and of two equally near ones
the upper is taken, as PyTorch and ml_dtypes do.

Codes of blocks: a block of neighbours shares a scale in e4m3 (nvfp4, 16) or e8m0 (mxfp4 and mxfp8, 32); beside
e4m3 scales one float32 number may scale a whole tensor. Shared by the ops and their tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from traceproof.lazy import torch

FP8_MAX = 448.0
FP8_BITS_RMS = 107.24  # RMS of fp8 values whose bit patterns are uniform, as `Draw.bits` makes them
BLOCK = 128  # fp8 block scale: weights share a scale over 128 x 128, activations over 1 x 128
FP4_BLOCK = 16  # nvfp4: 16 neighbours share an e4m3 scale
MX_BLOCK = 32  # mxfp4, mxfp8: 32 neighbours share an e8m0 scale
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; bit 3 is the sign
NEAREST, UP, DOWN = "nearest", "up", "down"


@dataclass(frozen=True, slots=True)
class Format:
    """A format of `1 + exponent + mantissa` bits; without a mantissa it has no sign, and no zero.

    Attributes:
        bias: what is taken off the exponent's bits.
        finite: how many of the codes without a sign are numbers. The next one is what overflows give.
        infinite: whether that is infinity, and NaN behind it; otherwise it is NaN, where there is one.
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    finite: int
    infinite: bool = False

    @property
    def signed(self) -> bool:
        """Whether one of its bits is a sign."""
        return self.mantissa > 0

    @property
    def codes(self) -> int:
        """How many codes there are without a sign, and the bit of the sign if there is one."""
        return 1 << (self.exponent + self.mantissa)

    @property
    def nan(self) -> int | None:
        """The first code of NaN; None: there is none."""
        return self.finite + self.infinite if self.finite < self.codes else None

    def value(self, code: int) -> float:
        """The number of a code without a sign, as if no code were infinity or NaN."""
        power, fraction = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        if self.signed and not power:
            return float(fraction) * 2.0 ** (1 - self.bias - self.mantissa)
        return (1 + fraction / (1 << self.mantissa)) * 2.0 ** (power - self.bias)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Values of codes, in float64. Codes are uint8, or the 8-bit float of this format, of any shape."""
        values = _values(self).to(codes.device)
        return values[codes.view(torch.uint8).long() & (len(values) - 1)]

    def encode(self, values: torch.Tensor, *, saturate: bool = True, rounding: str = NEAREST) -> torch.Tensor:
        """The codes of values, uint8. Without `saturate`, what rounds beyond the largest overflows.

        NaN becomes NaN, in e2m1 the largest number. Values that have no code in e8m0 get its smallest.
        """
        wide = values.to(torch.float64)
        magnitude = (wide.abs() if self.signed else wide).nan_to_num(nan=0.0, posinf=torch.inf)
        numbers = _numbers(self).to(wide.device)
        if rounding == NEAREST:
            middles = (numbers[1:] + numbers[:-1]) / 2
            code = torch.searchsorted(middles, magnitude)  # the lower code for a middle
            midway = magnitude == middles[code.clamp(max=len(middles) - 1)]
            code += midway & (code % 2 == 1) if self.signed else midway  # the even code, or the upper one
        elif rounding == UP:
            code = torch.searchsorted(numbers, magnitude)
        else:
            code = torch.searchsorted(numbers, magnitude, right=True) - 1
        overflows = not saturate and self.finite < self.codes
        code = code.clamp(0, self.finite if overflows else self.finite - 1)
        code = torch.where(wide.isnan(), self.finite - 1 if self.nan is None else self.nan, code)
        if self.signed:
            code += (torch.signbit(wide) & ~wide.isnan()) * self.codes
        return code.to(torch.uint8)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Values rounded to numbers of the format, saturating, in the dtype given."""
        return self.decode(self.encode(values)).to(values.dtype)

    def order(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes as int16 that ascend with their values, in steps of 1; -0 is -1, NaN 4096 (negative: -4097)."""
        code = codes.view(torch.uint8).to(torch.int16)
        magnitude = code & (self.codes - 1)
        if self.nan is not None:
            magnitude = torch.where(magnitude >= self.nan, 1 << 12, magnitude)
        return torch.where((code & self.codes) > 0, -1 - magnitude, magnitude) if self.signed else magnitude


E2M1 = Format("e2m1", exponent=2, mantissa=1, bias=1, finite=8)
E4M3 = Format("e4m3fn", exponent=4, mantissa=3, bias=7, finite=127)
E5M2 = Format("e5m2", exponent=5, mantissa=2, bias=15, finite=124, infinite=True)
E8M0 = Format("e8m0", exponent=8, mantissa=0, bias=127, finite=255)


@cache
def _values(form: Format) -> torch.Tensor:
    """The value of each code, float64 [codes], those with a sign last."""
    unsigned = torch.full((form.codes,), torch.nan, dtype=torch.float64)
    unsigned[: form.finite] = _numbers(form)[: form.finite]
    if form.infinite:
        unsigned[form.finite] = torch.inf
    return torch.cat([unsigned, -unsigned]) if form.signed else unsigned


@cache
def _numbers(form: Format) -> torch.Tensor:
    """The numbers without a sign, ascending, and the one that would come next, at which overflows begin."""
    return torch.tensor([form.value(code) for code in range(form.finite + 1)], dtype=torch.float64)


# Pairs of fp4 codes in bytes, and the order of scales in memory.


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two fp4 codes to a byte along the last axis, the first in its low half: uint8 [..., n] to [..., n / 2]."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The codes that bytes hold along the last axis, uint8 [..., n] to [..., 2 n]."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def swizzled_size(rows: int, columns: int, height: int = 128) -> int:
    """How many scales tiles of `height` rows and 4 columns hold, those that fill them up included."""
    return -(-rows // height) * height * (-(-columns // 4) * 4)


def swizzle(scales: torch.Tensor, height: int = 128) -> torch.Tensor:
    """Scales [..., rows, columns] in the order that tensor cores read, [..., swizzled_size], zeros between.

    In tiles of `height` x 4, row by row of tiles. Within one of 128, four rows that lie 32 apart are neighbours;
    one of 8 is in order.
    """
    *outer, rows, columns = scales.shape
    tiles_down, tiles_across, apart = -(-rows // height), -(-columns // 4), min(height, 32)
    padded = scales.new_zeros((*outer, tiles_down * height, tiles_across * 4))
    padded[..., :rows, :columns] = scales
    by_tile = padded.view(math.prod(outer), tiles_down, height // apart, apart, tiles_across, 4)
    return by_tile.permute(0, 1, 4, 3, 2, 5).reshape(*outer, tiles_down * tiles_across * height * 4)


def unswizzle(scales: torch.Tensor, rows: int, columns: int, height: int = 128) -> torch.Tensor:
    """The opposite of `swizzle`: [..., swizzled_size] to [..., rows, columns]."""
    outer = scales.shape[:-1]
    tiles_down, tiles_across, apart = -(-rows // height), -(-columns // 4), min(height, 32)
    by_tile = scales.reshape(math.prod(outer), tiles_down, tiles_across, apart, height // apart, 4)
    padded = by_tile.permute(0, 1, 4, 3, 2, 5).reshape(*outer, tiles_down * height, tiles_across * 4)
    return padded[..., :rows, :columns]


# Blocks.


def scale_blocks(rows: torch.Tensor, scales: torch.Tensor, *, height: int, width: int = BLOCK) -> torch.Tensor:
    """Multiply a matrix by its block scales: [R, C] times [R / height, C / width], in the matrix's dtype.

    The last blocks may be cut short. Raises RuntimeError: there are too few or too many.
    """
    if rows.shape[0] % height or rows.shape[1] % width:
        filled = torch.nn.functional.pad(rows, (0, -rows.shape[1] % width, 0, -rows.shape[0] % height))
        scaled = scale_blocks(filled, scales, height=height, width=width)
        return scaled[: rows.shape[0], : rows.shape[1]].contiguous()
    blocks = rows.view(scales.shape[0], height, scales.shape[1], width)
    return (blocks * scales.to(rows.dtype)[:, None, :, None]).view(rows.shape)


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, and widen again to the dtype given."""
    return values.to(torch.bfloat16).to(values.dtype)


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn as kernels do, saturating at +-448, and widen again to the dtype given."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(values.dtype)


def in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """The last axis in blocks: [..., n] as [..., n / block, block]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // block, block)
