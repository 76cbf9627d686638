"""Values as codes of fp4 and fp8 with a scale per block: quantisers, alone or behind an activation, and caches.

A block's scale is its largest magnitude over the largest value of the elements' format: rounded to the nearest
e4m3 (nvfp4, which has one more scale, in float32, per tensor), or up to a power of two (mxfp4, mxfp8). OCP's rule
for the latter rounds the magnitude itself down to a power of two, and saturates. Both are right if none is named.

Kernels multiply by approximate reciprocals, so a scale or a code next to the middle of two may be either one. The
oracle returns the range of right codes: those next to its values, under each scale that is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.ops.adapter import SM80, Api, Call, Definition, Given, Outputs, dim, sizes
from traceproof.ops.base import Tensors
from traceproof.ops.compare import ANY_CODE, ANY_NUMBER, Entries, Exact, Fitting
from traceproof.ops.formats import (
    DOWN,
    E2M1,
    E4M3,
    E8M0,
    FP4_BLOCK,
    MX_BLOCK,
    NEAREST,
    UP,
    Format,
    in_blocks,
    pack,
    swizzle,
    swizzled_size,
    unpack,
)
from traceproof.ops.formula import Form, Formula, Mutant, Part, Wanted, Wide, altered, has, same
from traceproof.ops.gates import sigmoid, silu
from traceproof.ops.lossless import full
from traceproof.ops.op import ADVERSARIAL, Op

if TYPE_CHECKING:
    from traceproof.draw import Draw

NEAR = 2.0**-21  # relative error of approximate reciprocals: eight float32 roundings
ROUNDED = 2.0**-8 + NEAR  # and one of bfloat16, where a kernel may keep values in it before it quantises them
Over = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]  # values and their scales -> quotients
Drawn = Callable[["Draw", Wanted], "torch.Tensor"]
Bounds = tuple["torch.Tensor", "torch.Tensor"]  # least and greatest rank of right codes, [..., pairs]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How blocks of values become codes and scales.

    Attributes:
        element, scale: formats of the values and of the scales.
        width: values per block.
        rules: right ways to a scale: (divisor of the largest magnitude, rounding); `encode` takes the first.
        least: smallest scale before rounding.
    """

    element: Format
    scale: Format
    width: int
    rules: tuple[tuple[float, str], ...]
    least: float = 0.0


NVFP4 = Scheme(E2M1, E4M3, FP4_BLOCK, ((6.0, NEAREST),))
MXFP4 = Scheme(E2M1, E8M0, MX_BLOCK, ((6.0, UP), (4.0, DOWN)))
MXFP8 = Scheme(E4M3, E8M0, MX_BLOCK, ((448.0, UP), (256.0, DOWN)))
MXFP8_UP = Scheme(E4M3, E8M0, MX_BLOCK, ((448.0, UP),))


def peak(blocks: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block, [..., width] to [...]."""
    return blocks.abs().amax(-1)


def quotient(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values over their scales."""
    return values / scale


@dataclass(frozen=True, slots=True)
class Coder:
    """A quantiser by a scheme; the other fields are parameters that variants and mutants change."""

    scheme: Scheme
    peaks: Part = peak
    scales: Part = same  # of the scales before they are rounded
    over: Over = quotient
    codes: Part = same  # of quotients before they are rounded
    toward: str = NEAREST  # of quotients to codes
    unrounded: bool = False  # divide by the scales before they are rounded

    def exact_scales(self, x: torch.Tensor, rule: int = 0) -> torch.Tensor:
        """Scales before they are rounded, [..., n / width], of x [..., n]."""
        divisor, _ = self.scheme.rules[rule]
        return self.scales(self.peaks(in_blocks(x, self.scheme.width)) / divisor).clamp_min(self.scheme.least)

    def quotients(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Values over their blocks' scales, [..., n], which are rounded to codes; 0 where a scale is 0."""
        blocks = self.over(in_blocks(x, self.scheme.width), scales[..., None])
        return self.codes(torch.where(scales[..., None] > 0, blocks, 0.0)).reshape(x.shape)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of x, uint8 [..., n], and of its blocks' scales, [..., n / width]."""
        scales = self.exact_scales(x)
        scale_codes = self.scheme.scale.encode(scales, rounding=self.scheme.rules[0][1])
        if not self.unrounded:
            scales = self.scheme.scale.decode(scale_codes).to(x.dtype)
        return self.scheme.element.encode(self.quotients(x, scales), rounding=self.toward), scale_codes

    def allowed(self, x: torch.Tensor, near: float) -> tuple[Bounds, Bounds]:
        """Bounds of the right codes of values, and of scales, if x has relative errors of up to `near`.

        Both zeros are right. A block of zeros may have any number as scale, unless there is a least one; if a
        scale is 0, any code is right.
        """
        scheme = self.scheme
        blank = (self.exact_scales(x) == 0)[..., None] & (scheme.least == 0)
        most = torch.where(blank, ANY_NUMBER - 1, -ANY_CODE).to(torch.int16)
        most_codes = torch.where(blank, 0, -ANY_CODE).to(torch.int16).repeat_interleave(scheme.width, -2)
        of_scales, of_codes = [(-1 - most, most)], [(-1 - most_codes, most_codes)]  # first: zeros under any scale
        # then bounds under each rule, with scales that are too small and too large
        for rule, (_, rounding) in enumerate(scheme.rules):
            for error in (-near, near):
                scale_codes = scheme.scale.encode(self.exact_scales(x, rule) * (1 + error), rounding=rounding)
                scales = scheme.scale.decode(scale_codes)
                quotients = self.quotients(x, scales)
                any_code = (scales == 0).repeat_interleave(scheme.width, -1)[..., None]
                of_codes.append(any_where(any_code, around(quotients, near * quotients.abs(), scheme.element)))
                rank = scheme.scale.order(scale_codes)[..., None]
                of_scales.append((rank, rank))
        return joined(of_codes), joined(of_scales)


def around(x: torch.Tensor, slack: torch.Tensor, form: Format = E4M3) -> Bounds:
    """Bounds [..., 1] of the codes of values with errors of up to `slack`; both zeros are right."""
    low, high = (form.order(form.encode(end))[..., None] for end in (x - slack, x + slack))
    return low.masked_fill(low == 0, -1), high.masked_fill(high == -1, 0)  # ranks of 0 and -0


def any_where(free: torch.Tensor, bounds: Bounds) -> Bounds:
    """Bounds that allow any code where the bool mask `free`, which is broadcast, is set."""
    return bounds[0].masked_fill(free, -ANY_CODE), bounds[1].masked_fill(free, ANY_CODE)


def joined(pairs: Sequence[Bounds]) -> Bounds:
    """Several bounds [..., 1] as one [..., pairs], each pair of which is right."""
    return torch.cat([low for low, _ in pairs], -1), torch.cat([high for _, high in pairs], -1)


def under_scales(order: Part) -> Fitting:
    """Returns a function that keeps the bounds of codes under the scales, of ranks `order`, that were given.

    Entry `place` of the codes: where the scale of each is in the scales' output, int64 in the codes' shape.
    """

    def fitting(scales: torch.Tensor, of_scales: Entries, of_codes: Entries) -> Entries:
        rank, low, high = order(scales)[..., None], of_codes["low"], of_codes["high"]
        holds = ((of_scales["low"] <= rank) & (rank <= of_scales["high"])).flatten(0, -2)[of_codes["place"]]
        return {**of_codes, "low": low.masked_fill(~holds, ANY_CODE), "high": high.masked_fill(~holds, -ANY_CODE)}

    return fitting


def places_of(scales: torch.Tensor, layout: Part, width: int) -> torch.Tensor:
    """For each code, `width` per scale, the place of its scale in a layout that may have padding (zeros)."""
    numbers = torch.arange(1, scales.numel() + 1, device=scales.device)
    laid_out = layout(numbers.view(scales.shape)).flatten()
    places = laid_out.argsort()[len(laid_out) - len(numbers) :]
    return places.view(scales.shape).repeat_interleave(width, -1)


def coded_output(
    wide: Wide, name: str, codes: torch.Tensor, *, form: Format, bounds: Bounds | None, layout: Part = same
) -> Tensors:
    """An output of codes in its layout, as codes or decoded for a float dtype, with `@low` and `@high` bounds.

    Two fp4 codes are packed into a byte. The layout's padding may have any code.
    """
    if name not in wide.definition.outputs:
        return {}
    stored = pack(layout(codes)) if form is E2M1 else layout(codes)
    is_float = "float" in wide.definition.outputs[name].dtype
    entries = {name: form.decode(stored).to(wide.dtype) if is_float else stored}
    if bounds is not None:
        padding = (layout(torch.ones_like(codes)) == 0)[..., None]
        low, high = (torch.stack([layout(ranks) for ranks in end.unbind(-1)], -1) for end in bounds)
        entries[f"{name}@low"], entries[f"{name}@high"] = any_where(padding, (low, high))
    return entries


def unswizzled(layout: Part) -> Part:
    """A mutant's layout: a function whose result has the layout's shape, but scales row by row, then zeros."""

    def in_rows(scales: torch.Tensor) -> torch.Tensor:
        filled = torch.zeros_like(layout(scales))
        filled.view(-1)[: scales.numel()] = scales.reshape(-1)
        return filled

    return in_rows


# Inputs and an activation -> values [..., n], their factor, and a mask of rows that count (None: all)
Read = Callable[[Wide, Part], tuple["torch.Tensor", "torch.Tensor | float", "torch.Tensor | None"]]


def quantiser(
    scheme: Scheme,
    read: Read,
    *names: str,
    near: float = NEAR,
    codes_layout: Part = same,
    scales_layout: Part = same,
) -> Formula:
    """The formula of a quantiser with two outputs `names`, codes and scales, in their layouts."""
    codes_name, scales_name = names

    def formula(
        wide: Wide,
        *,
        change_factor: Callable[[Any], Any] = same,
        act: Part = silu,
        order: Part = same,  # changes the codes
        layout: Part = same,  # changes the codes of scales
        linear: bool = False,  # scales are row by row
        **changes: Any,  # noqa: ANN401 - a Coder's fields
    ) -> Tensors:
        """`code = x * factor / scale`; a block's scale is its largest magnitude over the format's largest."""
        x, factor, rows = read(wide, act)
        coder = Coder(scheme, **changes)
        codes, scales = coder.encode(x * change_factor(factor))
        code_bounds = scale_bounds = None
        if wide.dtype == torch.float64:
            code_bounds, scale_bounds = coder.allowed(x * factor, near)
            if rows is not None:
                not_counted = ~rows[..., None, None]
                code_bounds, scale_bounds = (any_where(not_counted, one) for one in (code_bounds, scale_bounds))
        outputs: Tensors = {}
        if code_bounds is not None:
            outputs[f"{codes_name}@place"] = codes_layout(places_of(scales, scales_layout, scheme.width))
        scales_in = unswizzled(scales_layout) if linear else scales_layout
        element, scale = scheme.element, scheme.scale
        return {
            **outputs,
            **coded_output(wide, codes_name, order(codes), form=element, bounds=code_bounds, layout=codes_layout),
            **coded_output(wide, scales_name, layout(scales), form=scale, bounds=scale_bounds, layout=scales_in),
        }

    return formula


EITHER = "codes next to the middle of two may be either"
GATES = {
    E2M1: Exact(EITHER, order=lambda packed: E2M1.order(unpack(packed))),
    E4M3: Exact(EITHER, order=E4M3.order),
    E8M0: Exact(EITHER, order=E8M0.order),
}


def two_level(wide: Wide) -> bool:
    """Whether an input scales the whole tensor."""
    return any("global" in name and value is not None for name, value in wide.values.items())


def tiled(wide: Wide) -> bool:
    """Whether scales have a single axis, in which tiles follow each other."""
    shapes = [spec.shape or () for spec in wide.definition.outputs.values()]
    return any(len(shape) == 1 and wide.definition.const_axes.get(shape[0]) != 0 for shape in shapes)


def ones(value: torch.Tensor) -> torch.Tensor:
    """A mutant's tensor: ones in place of scales or weights."""
    return torch.ones_like(value)


MUTANTS = (
    Mutant("one scale per row", scales=lambda scales: scales.sort(-1).values[..., -1:].expand(scales.shape)),
    Mutant("scale without a sign's absolute value", peaks=lambda blocks: blocks.amax(-1).abs()),
    Mutant("scale of the mean", peaks=lambda blocks: blocks.abs().mean(-1)),
    Mutant("scale of half a block", peaks=lambda blocks: peak(blocks[..., : blocks.shape[-1] // 2])),
    Mutant("scale twice as large", scales=lambda scale: scale * 2),
    Mutant("scale half as large", scales=lambda scale: scale / 2),
    Mutant("scale 4 per cent too large", scales=lambda scale: scale * 1.04),
    Mutant("values over unrounded scales", unrounded=True),
    Mutant("blocks' scales shifted", layout=lambda scales: scales.roll(1, -1)),
    Mutant("times the scale", over=lambda values, scale: values * scale),
    Mutant("cut off", toward=DOWN),
    Mutant("neighbours exchanged", order=lambda codes: in_blocks(codes, 2).flip(-1).flatten(-2)),
    Mutant("codes shifted", order=lambda codes: codes.roll(1, -1)),
    Mutant("signs lost", codes=lambda share: share.abs()),
)
OF_TENSORS = (
    Mutant("whole tensor's scale dropped", applies=two_level, change_factor=lambda factor: factor * 0 + 1),
    Mutant("whole tensor's scale inverted", applies=two_level, change_factor=lambda factor: 1 / factor),
)
IN_TILES = Mutant("scales row by row", applies=tiled, linear=True)


# Inputs of quantisers.


def of_rows(name: str, factor: str = "", *, gated: bool = False) -> Read:
    """Returns a function that reads rows `name` and their factor, an input (1 if absent).

    With `gated` the rows are act(first half) * second half.
    """

    def read(wide: Wide, act: Part) -> tuple[torch.Tensor, torch.Tensor | float, None]:
        rows, value = wide[name], wide.maybe(factor)
        if gated:
            gate, up = rows.chunk(2, -1)
            rows = act(gate) * up
        return rows, 1.0 if value is None else value, None

    return read


def of_groups(wide: Wide, _: Part) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Groups of rows [b, m, k], padded to a multiple of 128 columns, the factor 1, and a mask of valid rows."""
    x, mask = wide["a"], wide["mask"]
    filled = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128))
    return filled, 1.0, torch.arange(x.shape[1], device=x.device) < mask[:, None]


def grouped_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Scales [b, rows, columns] in tiles, [32, 4, rows / 128, 4, columns / 4, b]."""
    groups, rows, columns = scales.shape
    tiles = swizzle(scales).view(groups, -(-rows // 128), -(-columns // 4), 32, 4, 4)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def between(low: float, high: float) -> Drawn:
    """A function that draws uniform numbers in [low, high)."""
    return lambda draw, wanted: draw.uniform(wanted.name, wanted.shape, low=low, high=high).to(wanted.dtype)


def below(name: str, axis: int = 0, *, more: int = 0, least: int = 0) -> Drawn:
    """A function that draws whole numbers from `least` to below the size of another input's axis plus `more`."""
    return lambda draw, wanted: draw.integers(
        wanted.name, wanted.shape, low=least, high=max(wanted.shape_of(name)[axis] + more, 1)
    ).to(wanted.dtype)


def counts(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Random count of valid rows per group, [groups]: all rows in the first, none to all in the others."""
    rows = wanted.shape_of("a")[1]
    valid = draw.integers(wanted.name, wanted.shape, low=0, high=rows + 1)
    valid[:1] = rows
    return valid.to(wanted.dtype)


def of_codes(low: int, high: int, **special: tuple[int, int]) -> Drawn:
    """A function that draws tensors whose bytes are random in [low, high), in any dtype.

    In cases with a drawing instruction of `special` they are in its range.
    """

    def drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
        *outer, width = wanted.shape
        first, end = next((ends for name, ends in special.items() if name in wanted.params), (low, high))
        codes = draw.integers(wanted.name, (*outer, width * wanted.dtype.itemsize), low=first, high=end)
        return codes.to(torch.uint8).view(wanted.dtype)

    return drawn


SUBNORMAL, LARGEST = (1, 8), (0x70, 0x7F)  # codes of e4m3, which a kernel may flush to 0 or take for NaN
ANY_BYTES, ANY_SCALES = of_codes(0, 256), of_codes(0, 0x7F)  # any bits; e4m3 scales from 0 to 448
AROUND_ONE = of_codes(0x30, 0x40, scale=SUBNORMAL)  # e4m3 scales from 1/2 to below 2
ROWS = ("input", "a", "x", "latent_kv", "gated_input", "append_key", "append_value", "append_ckv")


def vary_blocks(tensors: dict[str, torch.Tensor], _: Mapping[str, float]) -> None:
    """Multiply blocks of 16 values by powers of two that differ from each neighbour's; some of 32 are zeros."""
    for name in ROWS:
        x = tensors.get(name)
        if x is not None and x.numel():
            blocks = x.reshape(x.numel() // x.shape[-1], x.shape[-1] // FP4_BLOCK, FP4_BLOCK)
            rows, columns = (torch.arange(size, device=x.device) for size in blocks.shape[:2])
            power = (columns * 5 + (rows + rows // 896)[:, None]) % 7 - 3  # differs among tiles of 128 rows
            factors = torch.exp2(power.float()).masked_fill((columns // 2 + rows[:, None]) % 5 == 3, 0.0)
            tensors[name] = (blocks * factors[..., None].to(x.dtype)).reshape(x.shape)


def exact_rows(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Multiples of 1/8 up to 4, with a 6 in each 16, times a power of two per row, so that scales are exact."""
    value = draw.integers(wanted.name, wanted.shape, low=-32, high=33).float() / 8
    value[value.abs() < 0.375] = 0.5  # smaller ones could become a zero of either sign
    value[..., ::16] = 6.0
    powers = torch.arange(value.shape[-2], device=value.device)[:, None] % 3
    return (value * torch.exp2(powers.float())).to(wanted.dtype)


def exact_halves(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Rows of gates of 64, which SiLU returns unchanged, and of `exact_rows` / 64, or their signs."""
    value = exact_rows(draw, wanted)
    gate, up = value.chunk(2, -1)
    up = up.sign() if "grad_output" in wanted.definition.inputs else up  # the gradient has the bits
    return torch.cat([torch.full_like(gate, 64.0), up / 64], -1)


GATED = {"input a gated_input": exact_halves, "grad_output": exact_rows, "global_scale a_global_sf": 64.0}
SHARED: dict[str, Any] = {
    "lossless": {"input a x latent_kv": exact_rows, "global_scale a_global_sf": 64.0},
    "adjust": vary_blocks,
    "adversarial": {**ADVERSARIAL, "faint": {"scale": 2.0**-16}},
    # of the size of 2,688 (448 * 6) / the largest value
    "draws": {"global_scale a_global_sf": between(200.0, 400.0)},
    "scalars": {"sf_vec_size": None},
    "adversarial_inputs": ROWS,
    "exact_on_gpu": lambda _: False,  # kernels may multiply by an inexact reciprocal
    "independent_rows": False,  # tiles hold the scales of many rows
    "tile": 128,
    "positive": ("global_scale", "a_global_sf"),  # each scales a whole tensor
}


def coded(
    op_type: str,
    scheme: Scheme,
    forms: Mapping[str, Read],
    *,
    near: float = NEAR,
    codes_layout: Part = same,
    scales_layout: Part = same,
    shared: Mapping[str, Any] = SHARED,
    **facts: Any,  # noqa: ANN401 - an Op's
) -> Op:
    """The op of a quantiser: `forms` are texts with two outputs, codes and scales, and functions that read inputs.

    `sizes` are needed unless scales are tiles of rows [m k].
    """
    codes, scales = re.findall(r"(\w+)\[", next(iter(forms)).partition("->")[2])
    layouts: dict[str, Any] = {"codes_layout": codes_layout, "scales_layout": scales_layout}
    known = [
        Form(text, quantiser(scheme, read, codes, scales, near=near, **layouts)) for text, read in forms.items()
    ]
    sizes = {"s": lambda at: swizzled_size(at["m"], at["k"] // scheme.width), "o": (1,)}
    gates = {codes: GATES[scheme.element], scales: GATES[scheme.scale]}
    follows = {codes: (scales, under_scales(scheme.scale.order))}
    where = f"k % {scheme.width} == 0; p * 2 == k; g * {scheme.width} == k"
    return Op(op_type, *known, gates=gates, follows=follows, **{"sizes": sizes, "where": where, **shared, **facts})


# quantization: FlashInfer's quantisers, and pages of DeepSeek's caches


LATENT = 512  # values per token in a page


@dataclass(frozen=True, slots=True)
class CodedPages:
    """Cache pages of tokens of 512 values: the bytes of all tokens' codes, then those of their scales."""

    scheme: Scheme
    code_bytes: int  # per token
    scale_bytes: int  # per token

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return self.code_bytes + self.scale_bytes

    def order(self, pages: torch.Tensor) -> torch.Tensor:
        """Ranks of the codes and scales in pages, [pages, tokens x (512 + scales)]."""
        flat = pages.reshape(len(pages), math.prod(pages.shape[1:]))
        split = flat.shape[1] // self.token_bytes * self.code_bytes
        codes = unpack(flat[:, :split]) if self.scheme.element is E2M1 else flat[:, :split]
        return torch.cat([self.scheme.element.order(codes), self.scheme.scale.order(flat[:, split:])], 1)

    def slots(self, draw: Draw, wanted: Wanted) -> torch.Tensor:
        """Random slots [rows], some of them outside of the pages, some of them equal."""
        tokens, [count] = math.prod(wanted.shape_of("cache")) // self.token_bytes, wanted.shape
        anywhere = draw.integers(wanted.name, wanted.shape, low=-2, high=tokens + 2)
        few = draw.integers(f"{wanted.name}.few", wanted.shape, low=0, high=max(min(tokens, count // 2), 1))
        few[1::7], few[4::7] = -1, tokens
        return torch.where(torch.arange(count, device=draw.device) % 3 == 0, anywhere, few).to(wanted.dtype)

    def formula(
        self,
        wide: Wide,
        *,
        order: Part = same,  # changes the codes
        layout: Part = same,  # changes the codes of scales
        kept: str = "amin",  # reduction that selects among several rows for one slot: the first
        wrapped: bool = False,  # slots outside of the pages are taken modulo their number
        records: bool = False,  # each token's scales follow its codes
        **changes: Any,  # noqa: ANN401 - a Coder's fields
    ) -> Tensors:
        """The cache [pages, bytes], uint8, with each row of `latent_kv` as codes and scales in the row's slot.

        Of several rows for one slot the first is written; rows whose slot lies outside are skipped. The keyword
        arguments make mutants of it.
        """
        [(name, spec)] = wide.definition.outputs.items()
        shape = wide.definition.shape_of(spec, sizes(wide.definition, wide.values)) or ()
        tokens = math.prod(shape) // self.token_bytes
        x = wide["latent_kv"].flatten(0, -2)
        before = wide.maybe("cache")
        old = torch.zeros(shape, dtype=torch.uint8, device=x.device) if before is None else before
        rows = slots = torch.arange(len(x), device=x.device)
        if "slot_mapping" in wide:
            slots = wide.given("slot_mapping").long()
            slots = slots % max(tokens, 1) if wrapped else slots
            rows = rows[(slots >= 0) & (slots < tokens)]
            row_of_slot = torch.full((tokens,), -1, device=x.device)
            row_of_slot = row_of_slot.scatter_reduce(0, slots[rows], rows, kept, include_self=False)
            slots = (row_of_slot >= 0).nonzero()[:, 0]
            rows = row_of_slot[slots]
        coder = Coder(self.scheme, **changes)
        codes, scales = coder.encode(x[rows])
        stored = pack(order(codes)) if self.scheme.element is E2M1 else order(codes)

        def put(pages: torch.Tensor, new_codes: torch.Tensor, new_scales: torch.Tensor) -> torch.Tensor:
            """Pages [pages, ...] with codes and scales [rows, ...] in their slots, as [pages, all of a page]."""
            flat = pages.reshape(len(pages), math.prod(pages.shape[1:]))
            per_code, per_scale = new_codes.shape[1], new_scales.shape[1]
            split = flat.shape[1] * per_code // (per_code + per_scale)
            page_codes, page_scales = flat[:, :split], flat[:, split:]
            all_codes, all_scales = page_codes.reshape(tokens, per_code), page_scales.reshape(tokens, per_scale)
            all_codes = all_codes.index_put((slots,), new_codes)
            all_scales = all_scales.index_put((slots,), new_scales)
            if records:
                return torch.cat([all_codes, all_scales], 1).reshape(flat.shape)
            return torch.cat([all_codes.view(page_codes.shape), all_scales.view(page_scales.shape)], 1)

        outputs = {name: put(old, stored, layout(scales)).view(shape)}
        if wide.dtype == torch.float64:
            ranks, width = self.order(old), self.scheme.width
            places = torch.arange(ranks.numel(), device=x.device).view(ranks.shape)
            of_scales = places[:, ranks.shape[1] // (width + 1) * width :]  # a page's scales follow its codes
            outputs[f"{name}@place"] = torch.cat([of_scales.repeat_interleave(width, 1), of_scales], 1)
            code_bounds, scale_bounds = coder.allowed(x[rows], NEAR)
            for what, code_end, scale_end in zip(("low", "high"), code_bounds, scale_bounds, strict=True):
                each = zip(code_end.unbind(-1), scale_end.unbind(-1), strict=True)
                outputs[f"{name}@{what}"] = torch.stack([put(ranks, *ends) for ends in each], -1)
        return outputs

    def op(self) -> Op:
        """The op that writes whole pages, or single slots."""
        whole_pages = [
            f"latent_kv{rows} kv_layout? -> cache{pages}"
            for rows in ("[p t d]", "[p u t d]", "[p t u d]")  # one head, before or behind the tokens of a page
            for pages in ("[p u t z]", "[p t u z]")
        ]
        single_slots = [
            f"latent_kv{rows} slot_mapping[n] cache{pages} -> cache_out{pages}"
            for rows in ("[a d]", "[a b d]", "[a b c d]")
            for pages in ("[p t z]", "[p u t z]", "[p y]")
        ]
        return Op(
            "quantization",
            *(Form(text, self.formula) for text in (*whole_pages, *single_slots)),
            **SHARED | {"draws": {"slot_mapping": self.slots, "cache": ANY_BYTES}},
            sizes={
                **dict.fromkeys("tu", (2, 1, 3, 4)),
                "a": (6, 1, 9, 5),
                "b": (2, 3, 1),
                "c": (1, 2, 3),
                "n": lambda at: at["a"] * at.get("b", 1) * at.get("c", 1),
                "y": lambda at: (
                    (4 if at["y"] < self.token_bytes else -(-at["y"] // self.token_bytes)) * self.token_bytes
                ),
            },
            gates={"cache cache_out": Exact(EITHER, order=self.order)},
            follows={name: (name, under_scales(self.order)) for name in ("cache", "cache_out")},
            requires=self.misfit,
        )

    def misfit(self, definition: Definition) -> str | None:
        """Why a definition's pages are not of this kind; None if they are."""
        if self.token_bytes not in definition.const_axes.values():
            return f"pages have no tokens of {self.token_bytes} bytes"
        if dim(definition, "latent_kv", -1) != LATENT:
            return f"rows have no {LATENT} values"
        given = {axis for spec in definition.inputs.values() for axis in spec.shape or ()}
        shapes = (spec.shape or () for spec in definition.outputs.values())
        if unknown := {*chain.from_iterable(shapes)} - given - definition.const_axes.keys():
            return f"nobody states the size of {sorted(unknown)}"
        dtypes = {spec.dtype for name, spec in definition.outputs.items() if name in {"cache", "cache_out"}}
        return None if dtypes == {"uint8"} else f"pages are {', '.join(dtypes)}, not bytes"


DSV_FP4 = CodedPages(Scheme(E2M1, E4M3, FP4_BLOCK, ((6.0, NEAREST),), least=2.0**-9), 256, 32)
DSV_FP8 = CodedPages(Scheme(E4M3, E8M0, MX_BLOCK, ((448.0, UP),), least=1e-4), 512, 16)
coded_rows = partial(coded, "quantization", scales_layout=swizzle)
QUANTIZATION = coded_rows(
    NVFP4,
    {
        "input[m k] global_scale[o]? sf_vec_size? -> quantized[m p] scales[s]": of_rows("input", "global_scale"),
        "a[m k] a_global_sf[o] sf_vec_size? -> quantized[m p] scales[s]": of_rows("a", "a_global_sf"),
    },
    family="quantisation",
    mutants=(
        *MUTANTS,
        *OF_TENSORS,
        IN_TILES,
        Mutant("the last of equal slots kept", applies=has("slot_mapping"), kept="amax"),
        Mutant("slots taken around the pages", applies=has("slot_mapping"), wrapped=True),
        Mutant("scales behind each token's data", applies=has("latent_kv"), records=True),
    ),
    other_forms=(
        coded_rows(MXFP8, {"input[m k] -> quantized[m k] scales[s]": of_rows("input")}),
        coded_rows(MXFP4, {"a[m k] -> quantized[m p] scales[s]": of_rows("a")}),
        coded_rows(
            NVFP4,
            {
                "input[m w] global_scale[o] sf_vec_size? -> x_q[m p] sf[s]": of_rows(
                    "input", "global_scale", gated=True
                )
            },
            near=ROUNDED,
            lossless=GATED,
            sizes={"s": lambda at: swizzled_size(at["m"], at["w"] // (2 * FP4_BLOCK)), "o": (1,)},
            where="w % 32 == 0; p * 4 == w",
        ),
        coded(
            "quantization",
            MXFP8,
            {"a[b m k] mask[b] -> x_q[m w b] sf[x y r z c b]": of_groups},
            scales_layout=grouped_tiles,
            where="k % 16 == 0",  # rows are padded
            codes_layout=lambda codes: codes.permute(1, 2, 0),
            draws={"mask": counts},
            tile=300,  # of several tiles
            unread={"mask": "rows behind it may hold anything"},
            sizes={"b": (1, 2, 3, 5), "r": lambda at: -(-at["m"] // 128)},
        ),
        DSV_FP4.op(),
        DSV_FP8.op(),
    ),
)


# quantize_fp4, quantize_nvfp4_smooth, activation_quantize


SMOOTHED = "x[m n] pre_quant_scale[n] global_scale[o] -> xq[m h] sf[s]"
QUANTIZE_FP4 = coded(
    "quantize_fp4",
    NVFP4,
    {
        # Divided, since global_scale multiplies the values when they are decoded.
        "input[m k] global_scale[o] -> x_q[m p] sf[m g]": lambda wide, _: (
            wide["input"],
            1 / wide["global_scale"],
            None,
        )
    },
    draws={"global_scale": between(1 / 400, 1 / 200)},
    lossless={"input": exact_rows, "global_scale": 1 / 64},
    independent_rows=True,
    family="quantisation",
    sizes={"o": (1,)},
    mutants=(*MUTANTS, *OF_TENSORS),
)
QUANTIZE_SMOOTH = coded(
    "quantize_nvfp4_smooth",
    NVFP4,
    {SMOOTHED: lambda wide, _: (wide["x"] * wide["pre_quant_scale"], wide["global_scale"], None)},
    near=ROUNDED,
    scales_layout=swizzle,
    draws={"global_scale": between(200.0, 400.0), "pre_quant_scale": between(0.5, 1.5)},
    lossless={"x": exact_rows, "pre_quant_scale": 1.0, "global_scale": 64.0},
    family="quantisation",
    sizes={"s": lambda at: swizzled_size(at["m"], at["n"] // FP4_BLOCK), "o": (1,)},
    where="n % 16 == 0; h * 2 == n",
    mutants=(
        *MUTANTS,
        *OF_TENSORS,
        IN_TILES,
        altered("columns' scales dropped", "pre_quant_scale", change=ones),
        altered("columns' scales inverted", "pre_quant_scale", change=lambda scale: 1 / scale),
    ),
)


def activated(wide: Wide, act: Part, *, slope: bool = True) -> torch.Tensor:
    """`silu(gate) * up` [m k] or, if `grad_output` is given, the gradient by gate and up [m 2k]."""
    gate, up = wide["gated_input"].chunk(2, -1)
    grad = wide.maybe("grad_output")
    if grad is None:
        return act(gate) * up
    gate_share = sigmoid(gate)
    derivative = gate_share * (1 + gate * (1 - gate_share)) if slope else gate_share
    return torch.cat([derivative * grad * up, act(gate) * grad], -1)


def by_rows_and_columns(
    wide: Wide,
    *,
    act: Part = silu,
    slope: bool = True,
    columns: Part = lambda x: x.mT,
    **changes: Any,  # noqa: ANN401 - a quantiser's
) -> Tensors:
    """mxfp8 codes in blocks along rows, scales in rows, and along columns, scales in tiles; one may be empty."""
    x = activated(wide, act, slope=slope)
    in_columns: dict[str, Part] = {"codes_layout": lambda codes: codes.mT, "scales_layout": swizzle}
    outputs: Tensors = {}
    for side, values, layouts in (("row", x, {}), ("col", columns(x), in_columns)):
        names = (f"{side}_output", f"{side}_scales")
        if len(wide.definition.outputs[names[0]].shape or ()) > 1:
            of_side = quantiser(MXFP8_UP, lambda *_, x=values: (x, 1.0, None), *names, near=ROUNDED, **layouts)
            outputs |= of_side(wide, **changes)
        else:  # not asked for, and empty
            outputs |= {name: torch.zeros(0, dtype=wide.dtype) for name in names}
            outputs |= {f"{name}@{end}": torch.zeros(0, 1) for name in names for end in ("low", "high")}
            outputs[f"{names[0]}@place"] = torch.zeros(0, dtype=torch.int64)
    return outputs


def gated_in(rows: bool, columns: bool, **facts: Any) -> Op:  # noqa: ANN401, FBT001 - an Op's
    """The op of FlashInfer's fused activation and quantiser in blocks along rows, columns, or both."""
    outputs = (
        f"row_output[{'m o' if rows else 'z'}] col_output[{'m o' if columns else 'z'}]"
        f" row_scales[{'m g' if rows else 'z'}] col_scales[{'s' if columns else 'z'}]"
    )
    return Op(
        "activation_quantize",
        Form(f"gated_input[m w] rowwise colwise grad_output[m k]? -> {outputs}", by_rows_and_columns),
        **SHARED | {"scalars": {"rowwise": rows, "colwise": columns}, "draws": {}, "lossless": GATED},
        unread={"rowwise colwise": "the outputs' shapes say it"},
        sizes_in_numbers=("rowwise", "colwise"),
        sizes={
            "m": lambda at: 256 if at["m"] == 1 else -(-at["m"] // 128) * 128,  # of columns' scales two tiles once
            "s": lambda at: at["m"] * at["o"] // MX_BLOCK,
        },
        where="w % 64 == 0; w == 2 * k; w in (o, 2 * o); g * 32 == o",
        least_outputs=4,
        gates={"row_output col_output": GATES[E4M3], "row_scales col_scales": GATES[E8M0]},
        follows={f"{side}_output": (f"{side}_scales", under_scales(E8M0.order)) for side in ("row", "col")},
        **facts,
    )


ACTIVATION_QUANTIZE = gated_in(
    rows=True,
    columns=True,
    family="quantisation",
    mutants=(
        *MUTANTS,
        IN_TILES,
        Mutant("activation dropped", act=same),
        Mutant(
            "memory read by columns",
            applies=lambda wide: bool(wide.values.get("colwise")),
            columns=lambda x: x.reshape(x.mT.shape),
        ),
        Mutant("slope of the sigmoid forgotten", applies=has("grad_output"), slope=False),
    ),
    other_forms=(
        gated_in(rows=True, columns=False),
        gated_in(rows=False, columns=True),
        coded(  # rows of several experts, all of which count
            "activation_quantize",
            NVFP4,
            {
                "a[b m w] mask[*]? a_global_sf[o] -> a_fp4[b m p] a_sf[b m g]": of_rows(
                    "a", "a_global_sf", gated=True
                )
            },
            near=ROUNDED,
            lossless=GATED,
            absent=("mask",),
            unread={"mask": "all rows count"},
            sizes={
                "m": (5, 3, 2),
                # two halves of whole blocks, for any width of a larger case
                "w": lambda at: -(-at["w"] // 32) * 32 if at["w"] > 1 else 32 * (at["m"] % 3 + 2),
                "p": lambda at: at["w"] // 4,
                "g": lambda at: at["w"] // 2 // FP4_BLOCK,
                "o": (1,),
            },
        ),
    ),
)


# dequantize_fp4: a paged cache in nvfp4, gathered


def gathered(
    wide: Wide,
    *,
    heads_first: bool = False,
    order: Part = same,
    change_scales: Part = same,
    scale_power: int = 1,
    more_tokens: int = 0,
    tables: Part = same,
    values: str = "v",
) -> Tensors:
    """Keys and values of sequences, `code * block's scale * cache's scale`, by a table of pages.

    Unchanged beyond `seq_lens`. The keyword arguments but `heads_first` make mutants of it.
    """
    outputs, lengths = {}, wide["seq_lens"].long() + more_tokens
    for part, source in (("k", "k"), ("v", values)):
        codes = order(unpack(wide.given(f"paged_{source}_cache")))
        scales = change_scales(E4M3.decode(wide.given(f"{source}_scales")).to(wide.dtype))
        pages = (in_blocks(E2M1.decode(codes).to(wide.dtype), FP4_BLOCK) * scales[..., None]).flatten(-2)
        pages = pages.transpose(1, 2) if heads_first else pages  # [pages, tokens, heads, channels]
        page_size, old = pages.shape[1], wide[f"output_{part}"]
        token = torch.arange(old.shape[1], device=old.device)
        page = tables(wide["block_tables"].long())[:, token // page_size]
        new = pages[page, token % page_size] * wide[f"{source}_scale"] ** scale_power
        outputs[f"output_{part}_out"] = torch.where((token < lengths[:, None])[..., None, None], new, old)
    return outputs


PAGED = (
    "paged_k_cache[{0} c] paged_v_cache[{0} e] k_scales[{0} x] v_scales[{0} y] block_tables[b n] seq_lens[b]"
    " k_scale[o] v_scale[o] output_k[b l h d] output_v[b l h f] -> output_k_out[b l h d] output_v_out[b l h f]"
)
DEQUANTIZE_FP4 = Op(
    "dequantize_fp4",
    Form(PAGED.format("p t h"), gathered),
    Form(PAGED.format("p h t"), partial(gathered, heads_first=True)),
    family="quantisation",
    independent_rows=False,
    sizes={
        "l": (9, 5, 20, 16),
        "o": (1,),
        "n": lambda at: -(-at["l"] // at["t"]) + 1,
        "p": lambda at: at["b"] * at["n"] + 2,
    },
    roomy="np",
    where="d % 16 == 0; c * 2 == d; x * 16 == d; f % 16 == 0; e * 2 == f; y * 16 == f",
    draws={
        "paged_k_cache paged_v_cache": ANY_BYTES,
        "k_scales v_scales": AROUND_ONE,
        "k_scale v_scale": between(0.5, 1.5),
        "block_tables": below("paged_k_cache"),
        "seq_lens": below("output_k", 1, more=1),
    },
    adversarial={"tiny": ADVERSARIAL["tiny"]},
    lossless={
        "k_scale v_scale": 257 / 256,  # of more bits than bfloat16 holds
        "k_scales v_scales": ANY_SCALES,
        "output_k output_v": full(0),
    },
    mutants=(
        Mutant("neighbours exchanged", order=lambda codes: in_blocks(codes, 2).flip(-1).flatten(-2)),
        Mutant("signs lost", order=lambda codes: codes & 7),
        Mutant("blocks' scales dropped", change_scales=ones),
        Mutant("blocks' scales shifted", change_scales=lambda scale: scale.roll(1, -1)),
        Mutant("subnormal scales are 0", change_scales=lambda scale: scale.where(scale >= 2.0**-6, 0.0)),
        Mutant("blocks' scales inverted", change_scales=lambda scale: 1 / scale),
        Mutant("whole cache's scale dropped", scale_power=0),
        Mutant("whole cache's scale inverted", scale_power=-1),
        Mutant("a token more", more_tokens=1),
        Mutant("a token less", more_tokens=-1),
        Mutant("always the first page", tables=lambda table: table[:, :1].expand(table.shape)),
        Mutant("the next sequence's pages", tables=lambda table: table.roll(1, 0)),
        Mutant(
            "keys for values", applies=lambda wide: wide["output_k"].shape == wide["output_v"].shape, values="k"
        ),
    ),
)
KV_DEQUANTIZE = "flashinfer:nvfp4_kv_dequantize_paged"


@DEQUANTIZE_FP4.truth("flashinfer", "nvfp4_kv_dequantize_paged", KV_DEQUANTIZE, rows="seq_lens", sm=SM80)
def _flashinfer_paged(api: Api, definition: Definition, inputs: Given) -> Outputs:
    heads = (definition.inputs["output_k"].shape or ("", "", ""))[2]
    layout = "HND" if (definition.inputs["paged_k_cache"].shape or ("", ""))[1] == heads else "NHD"
    keys, values = inputs["output_k"].clone(), inputs["output_v"].clone()
    api[KV_DEQUANTIZE](
        (inputs["paged_k_cache"], inputs["paged_v_cache"]),
        (inputs["k_scales"], inputs["v_scales"]),
        *(inputs[name] for name in ("block_tables", "seq_lens", "k_scale", "v_scale")),
        keys,
        values,
        kv_layout=layout,
    )
    return {"output_k_out": keys, "output_v_out": values}


# Calls.

SM100, SM120 = ((10, 0), (12, 9)), ((12, 0), (12, 1))
FUSED = "gated_input rowwise colwise{} -> row_output col_output row_scales col_scales"
# FlashInfer's functions whose scales are in tiles: the op, the arguments, the outputs.
IN_ORDER = {
    "fp4_quantize": (QUANTIZATION, "input [global_scale]", "quantized scales"),
    "nvfp4_quantize": (QUANTIZATION, "a a_global_sf", "quantized scales"),
    "mxfp4_quantize": (QUANTIZATION, "a", "quantized scales"),
    "mxfp8_quantize": (QUANTIZATION, "input", "quantized scales"),
    "silu_and_mul_nvfp4_quantize": (QUANTIZATION, "input global_scale", "x_q sf"),
    "nvfp4_quantize_smooth": (QUANTIZE_SMOOTH, "x pre_quant_scale global_scale", "xq sf"),
}


def returns(*dtypes: str) -> Callable[[Definition], bool]:
    """Condition for `accepts`: all outputs have one of these dtypes."""
    return lambda definition: all(spec.dtype in dtypes for spec in definition.outputs.values())


def in_tiles(key: str, arguments: str, outputs: str) -> Call:
    """A call of a function that returns codes and tiled scales; the scales become bytes in one axis."""
    names, (codes_name, scales_name) = arguments.replace("[", "").replace("]", "").split(), outputs.split()

    def call(api: Api, _: Definition, inputs: Given) -> Outputs:
        codes, scales = api[key](*(inputs[name] for name in names if name in inputs))
        return {codes_name: codes, scales_name: scales.view(torch.uint8).reshape(-1)}

    return call


for _name, (_op, _arguments, _outputs) in IN_ORDER.items():
    _op.truth(
        "flashinfer",
        _name,
        f"flashinfer:{_name}",
        serves=f"{_arguments} {'' if _op is QUANTIZE_SMOOTH else '[sf_vec_size]'} -> {_outputs}",
        accepts=returns("uint8", *(("float8_e4m3fn",) if _name == "mxfp8_quantize" else ())),
        sm=SM100,
    )(in_tiles(f"flashinfer:{_name}", _arguments, _outputs))
KV_QUANTIZE = "flashinfer:nvfp4_kv_quantize"
SCALED = "flashinfer:silu_and_mul_scaled_nvfp4_experts_quantize"
QUANTIZATION.called("quantization:mxfp8_grouped_quantize", "a mask -> x_q sf", rows="a", sm=SM100)


@QUANTIZE_FP4.truth("flashinfer", "nvfp4_kv_quantize", KV_QUANTIZE, sm=SM100)
def _flashinfer_kv(api: Api, _: Definition, inputs: Given) -> Outputs:
    codes, scales = api[KV_QUANTIZE](inputs["input"], inputs["global_scale"])
    return {"x_q": codes, "sf": scales.view(torch.float8_e4m3fn)}


@ACTIVATION_QUANTIZE.truth(
    "flashinfer",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
    SCALED,
    serves="a [mask] a_global_sf -> a_fp4 a_sf",
    sm=SM100,
)
def _flashinfer_experts(api: Api, _: Definition, inputs: Given) -> Outputs:
    """All rows count, whatever `mask` says; the kernel returns codes with experts last, and scales in tiles."""
    a = inputs["a"]
    valid_rows = torch.full((len(a),), a.shape[1], dtype=torch.int32, device=a.device)
    codes, tiles = api[SCALED](a, valid_rows, inputs["a_global_sf"])
    scales = tiles.permute(5, 2, 1, 0, 4, 3).reshape(len(a), tiles.shape[2] * 128, tiles.shape[4] * 4)
    return {"a_fp4": codes.permute(2, 0, 1), "a_sf": scales[:, : a.shape[1], : a.shape[2] // (2 * FP4_BLOCK)]}


def _flashinfer_fused(api: Api, definition: Definition, inputs: Given) -> Outputs:
    tensors = [inputs[name] for name in ("gated_input", "grad_output") if name in inputs]
    [key] = [key for key in api if ("backward" in key) == ("grad_output" in inputs)]
    returned = api[key](*tensors, rowwise=bool(inputs["rowwise"]), colwise=bool(inputs["colwise"]))
    return dict(zip(definition.outputs, returned, strict=True))


for _direction, _gradient in (("forward", ""), ("backward", " grad_output")):
    ACTIVATION_QUANTIZE.truth(
        "flashinfer",
        f"silu_and_mul_mxfp8_{_direction}",
        f"flashinfer.gated_act_mxfp8:silu_and_mul_mxfp8_{_direction}",
        serves=FUSED.format(_gradient),
        sm=((10, 0), (10, 7)),
    )(_flashinfer_fused)


def pages_of(cache: CodedPages, kind: str) -> None:
    """Declare FlashInfer's functions that write these pages: whole ones, and single slots."""
    pack_pages, append = (f"dsv41_{kind}_quantize_{verb}_sparse_mla_cache" for verb in ("pack", "append"))
    of_kind: Any = {"accepts": lambda one: cache.misfit(one) is None, "sm": SM120}
    key = f"flashinfer.mla:{pack_pages}"

    @QUANTIZATION.truth("flashinfer", pack_pages, key, serves="latent_kv [kv_layout] -> cache", **of_kind)
    def _(api: Api, definition: Definition, inputs: Given) -> Outputs:
        layout = "HND" if dim(definition, "cache", 1) == 1 else "NHD"
        return {"cache": api[key](inputs["latent_kv"], kv_layout=layout)}

    served = "latent_kv slot_mapping cache -> cache_out"
    QUANTIZATION.called(f"mla:{append}", served, name=append, written="cache", rows="latent_kv", **of_kind)


pages_of(DSV_FP4, "fp4")
pages_of(DSV_FP8, "fp8")
TORCH_BUCKETIZE, TORCH_FREXP = "torch:bucketize", "torch:frexp"


def by_pytorch(api: Api, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """nvfp4 codes [m, k / 2] and e4m3 scales [m, k / 16] of float32 rows [m, k], by PyTorch's functions."""
    blocks = x.reshape(len(x), x.shape[1] // FP4_BLOCK, FP4_BLOCK)
    scales = (blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    scale = scales.float()[..., None]
    share = torch.where(scale > 0, blocks / scale, 0.0).reshape(x.shape)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    below, above = (api[TORCH_BUCKETIZE](share.abs(), middles, right=right) for right in (False, True))
    nearest = torch.where(above % 2 == 0, above, below)  # the even code if midway
    codes = nearest | torch.signbit(share).int() << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales


@QUANTIZATION.truth(
    "torch",
    "bucketize, float8_e4m3fn",
    TORCH_BUCKETIZE,
    serves="[input] [a] [global_scale] [a_global_sf] [sf_vec_size] -> quantized scales",
    rows=None,
    accepts=lambda definition: len(definition.inputs) > 1,
)
@QUANTIZE_SMOOTH.truth("torch", "bucketize, float8_e4m3fn", TORCH_BUCKETIZE, rows=None)
def _pytorch_nvfp4(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """The rows times all scales, in the order of the inputs; `sf_vec_size` is no tensor."""
    x, *factors = (value.float() for value in inputs.values() if isinstance(value, torch.Tensor))
    for factor in factors:
        x = x * factor
    codes, scales = by_pytorch(api, x)
    return dict(zip(definition.outputs, (codes, swizzle(scales.view(torch.uint8))), strict=True))


@QUANTIZE_FP4.truth("torch", "bucketize, float8_e4m3fn", TORCH_BUCKETIZE, rows=None)
def _pytorch_linear(api: Api, definition: Definition, inputs: Given) -> Outputs:
    returned = by_pytorch(api, inputs["input"].float() / inputs["global_scale"])
    return dict(zip(definition.outputs, returned, strict=True))


@QUANTIZATION.truth(
    "torch",
    "frexp, float8_e4m3fn",
    TORCH_FREXP,
    serves="input -> quantized scales",
    rows=None,
    accepts=returns("uint8", "float8_e4m3fn"),
)
def _pytorch_mxfp8(api: Api, _: Definition, inputs: Given) -> Outputs:
    """In float32; a block's scale is its largest magnitude / 448, rounded up to a power of two."""
    x = inputs["input"].float()
    blocks = x.reshape(len(x), x.shape[1] // MX_BLOCK, MX_BLOCK)
    fraction, exponent = api[TORCH_FREXP](blocks.abs().amax(-1) / 448)
    power = (exponent - (fraction == 0.5).int()).clamp(-127, 127)
    codes = torch.ldexp(blocks, -power[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"quantized": codes.reshape(x.shape), "scales": swizzle((power + 127).to(torch.uint8))}
