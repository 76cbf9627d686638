"""Rotary position embedding: q and k rotated by angles of their positions, from a cache or computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from traceproof.dataset.constants import Rule
from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.models.drafts import Choice, Draft, Extraction, Facts, call_of, compared_with, draft
from traceproof.models.reading import Evidence, KernelCall
from traceproof.ops.adapter import SM75, SM80, Api, Definition, Given, Outputs
from traceproof.ops.base import Tensors
from traceproof.ops.cases import BOUNDARIES, BOUNDARY_ROWS, Case, boundaries
from traceproof.ops.compare import Close, Exact
from traceproof.ops.families.blockscaled import EITHER, NEAR, ROUNDED, Bounds, around, coded_output
from traceproof.ops.families.layout import PageAppend, in_first_page
from traceproof.ops.families.layout import places as placed_in_pages
from traceproof.ops.formats import DOWN, E4M3, NEAREST
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered, has, same
from traceproof.ops.lossless import full
from traceproof.ops.op import Op
from traceproof.stacks.sglang import KERNELS

CosSin = tuple["torch.Tensor", "torch.Tensor"]  # cosines and sines of each token's pairs of channels, [n 1 pairs]
Move = Callable[["torch.Tensor", int], "torch.Tensor"]  # (positions, size of the cache) -> positions
TOKENS = {"small": (1, 16), "medium": (64, 250), "large": (512, 2048)}  # tokens of each case
HEADS = ((8, 2), (4, 4))  # (heads of q, heads of k): shared, equal
POSITIONS = {"small": 64, "medium": 1024, "large": 8192}  # positions in the cache
GRID = 1 << 12  # t = tan(angle / 2) is drawn as a multiple of 1 / GRID


def pairs_halves(definition: Definition) -> bool:
    """Whether channel i is rotated with channel i + half (NeoX), not with its neighbour (GPT-J)."""
    return definition.constants.get("pairing") == "halves"


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, halves: bool) -> torch.Tensor:
    """Rotate n pairs of channels of x [.., d]: i with i + n, or neighbours; channels from 2 n on stay."""
    channel, count = torch.arange(cos.shape[-1], device=x.device), cos.shape[-1]
    first, second = (channel, channel + count) if halves else (2 * channel, 2 * channel + 1)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def from_cache(wide: Wide, move: Move, positions: str) -> CosSin:
    """Cosines and sines from the rows of `cos_sin_cache` [positions, cosines | sines] at positions.

    `move` changes the positions, as mutants do.
    """
    cache = wide["cos_sin_cache"]
    rows = cache[move(wide[positions].to(torch.int64), len(cache))].unsqueeze(1)  # the same for all heads
    half = cache.shape[-1] // 2
    return rows[..., :half], rows[..., half:]


ROTATED_CHANNELS = 32  # of a head, where a call says how many
FARTHEST = 8192  # position up to which float32 angles are exact enough beside a bfloat16 rounding
LLAMA = {  # Llama 3.1's values
    "rope_scale": 8.0,
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "old_context_len": 8192,
}


def of_angles(wide: Wide, move: Move) -> CosSin:
    """Cosines and sines of `position * theta^(-2 i / width) / scale` for each pair of channels i.

    Positions are `pos_ids`, or places in sequences (`indptr`) after an offset. Llama 3.1 divides by the scale
    where a context has at most `low_freq_factor` waves, not at all where it has `high_freq_factor`, and blends in
    between.
    """
    q, device = wide["q"], wide["q"].device
    llama = "low_freq_factor" in wide.definition.inputs
    defaults = LLAMA if llama else {"rope_scale": 1.0, "rope_theta": 1e4}
    number = {name: wide.number(name, default) for name, default in defaults.items()}
    if "indptr" in wide:
        starts = wide["indptr"].long()
        first = (wide["offsets"].long() - starts[:-1]).repeat_interleave(starts.diff())
        positions = torch.arange(len(q), device=device) + first
    else:
        positions = wide["pos_ids"].long()
    width = int(wide.number("rotary_dim", q.shape[-1]))
    channel = torch.arange(width // 2, device=device)
    frequency = number["rope_theta"] ** (-2 * channel.to(wide.dtype) / width)
    slow = frequency / number["rope_scale"]
    if llama:
        waves = number["old_context_len"] * frequency / (2 * math.pi)
        low, high = number["low_freq_factor"], number["high_freq_factor"]
        unscaled = ((waves - low) / (high - low)).clamp(0, 1)
        slow = (1 - unscaled) * slow + unscaled * frequency
    angle = move(positions, 1 << 20)[:, None, None].to(wide.dtype) * slow
    return torch.cos(angle), torch.sin(angle)


def rotate(
    wide: Wide,
    *,
    turn: Callable[[torch.Tensor, torch.Tensor], CosSin] = lambda cos, sin: (cos, sin),  # changes them
    move: Move = lambda positions, _: positions,  # changes positions
    right_pairs: bool = True,  # False: the other pairing of channels
    keys: bool = True,  # whether keys are rotated
    positions: str = "positions",  # name of the input with rows of the cache
) -> Tensors:
    """Rotate q and k [tokens, heads, channels] by a cache of cosines and sines, or by angles that are computed.

    Channels beyond the rotary width stay. q and k may be flat, [tokens, heads * channels]. `is_neox`, `interleave`
    or a constant of the definition says which channels form a pair. Mutants change the keywords.
    """
    cached = "cos_sin_cache" in wide
    cos, sin = turn(*(from_cache(wide, move, positions) if cached else of_angles(wide, move)))
    if "is_neox" in wide:
        halves = bool(wide.number("is_neox"))
    else:
        halves = pairs_halves(wide.definition) if cached else not wide.number("interleave", 0.0)
    outputs = {}
    for name in "qk":
        x = wide[name]
        shape = x.shape
        if len(shape) == 2:  # all heads of a token in one row, or no axis of heads
            width = int(wide.number("head_size", shape[-1]))
            x = x.reshape(len(x), shape[-1] // width, width)
        if keys or name == "q":
            x = rotated(x, cos, sin, halves=halves == right_pairs)
        outputs[f"{name}_out"] = outputs[f"{name}_rope"] = x.reshape(shape)
    return outputs


def heads_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw normal values; an outlier is the second channel of every head."""
    made = draw.normal(wanted.name, wanted.shape, wanted.dtype, scale=float(wanted.params.get("scale", 1.0)))
    if "outlier" in wanted.params:
        made[..., 1] = float(wanted.params["outlier"])
    return made


def key_heads(at: Mapping[str, int]) -> int:
    """The largest number of key heads `b`, at most what it is, of which the query heads `a` are a multiple."""
    return next(heads for heads in range(min(at["a"], at["b"]), 0, -1) if at["a"] % heads == 0)


def cos_sin_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw rows of cosines, then sines, of any angles; row 0 has the angle 0, as in a real cache.

    Points of the circle are ((1 - t^2) / (1 + t^2), 2 t / (1 + t^2)) for t in [-1, 1], or their mirror images:
    only exact and correctly rounded operations, so that the bits are the same everywhere.
    """
    count, half = wanted.shape[0], wanted.shape[1] // 2
    t = draw.integers("tangents", (count, half), torch.int64, low=-GRID, high=GRID + 1).to(torch.float64) / GRID
    mirrored = draw.integers("mirrored", (count, half), torch.int64, low=0, high=2).to(torch.bool)
    if count:
        t[0], mirrored[0] = 0.0, False
    square = t * t
    cos = (1 - square) / (1 + square)
    sin = 2 * t / (1 + square)
    made = torch.cat([torch.where(mirrored, -cos, cos), sin], dim=-1).to(torch.float32)
    return made.to(wanted.dtype)


def positions_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw positions with a repeat, 0 and the last one, or those that the case says: extreme, at boundaries."""
    count = wanted.shape_of("cos_sin_cache")[0]
    positions = draw.integers(wanted.name, wanted.shape, torch.int64, low=0, high=count)
    if wanted.params.get("positions") == "extreme":
        positions[::3], positions[1::3] = count - 1, 0
    elif wanted.params.get("positions") == BOUNDARIES:
        ends = torch.tensor(boundaries(count), device=draw.device)
        positions = ends[torch.arange(len(positions), device=draw.device) % len(ends)]
    elif len(positions) > 2:
        positions[0], positions[-1], positions[1] = 0, count - 1, positions[2].clone()
    return positions.to(wanted.dtype)


class Rope(Op):
    """Rotation from a cache; cases set tokens and positions together."""

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """Ordinary lengths, shared and equal heads, no token, one, extreme positions, tiny and large values."""

        def case(name: str, tokens: int, q_heads: int, k_heads: int, cached: int, **params: object) -> Case:
            letters = {"n": tokens, "a": q_heads, "b": k_heads, "p": cached, "e": 32}
            return self.case(definition, name, letters, seed, params)

        for size in sizes:
            for at, tokens in enumerate(TOKENS[size]):
                yield case(f"{size}-{at}", tokens, *HEADS[at], POSITIONS[size])
        yield case("edge-empty", 0, 4, 2, 8)
        yield case("edge-single", 1, 1, 1, 1)
        yield case("adversarial-positions", 9, 6, 1, 40_000, positions="extreme")
        yield case("adversarial-tiny", 8, 4, 4, 32, scale=1e-3)
        yield case("adversarial-outlier", 8, 4, 4, 32, outlier=300.0)

    def boundaries(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """A case of tokens at the first and last positions of a cache, and on both sides of tiles' borders."""
        letters = {"n": BOUNDARY_ROWS, "a": 6, "b": 1, "p": 4097, "e": 32}
        yield self.case(definition, f"adversarial-{BOUNDARIES}", letters, seed, {"positions": BOUNDARIES})


# Without a cache angles are computed, of positions, or of places in sequences that begin at an offset.


def offsets_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw positions or offsets below FARTHEST; as `indptr`, bounds of sequences of about equal lengths."""
    if wanted.name == "indptr":
        tokens, count = wanted.shape_of("q")[0], wanted.shape[0] - 1
        return (torch.arange(count + 1, device=draw.device) * tokens // max(1, count)).to(wanted.dtype)
    return draw.integers(wanted.name, wanted.shape, torch.int64, low=0, high=FARTHEST).to(wanted.dtype)


ANGLES = "rotary_dim? interleave? rope_scale? rope_theta? low_freq_factor? high_freq_factor? old_context_len?"
BY_THETA = " ".join(f"[{name.rstrip('?')}]" for name in ANGLES.split()) + " -> q_out k_out q_rope k_rope"
ROTATED = "q_out[n a d] k_out[n b e] q_rope[n a d] k_rope[n b e]"
ANGLED = Op(
    "rope",
    Form(f"q[n a d] k[n b e] pos_ids[n] {ANGLES} -> {ROTATED}", rotate),
    Form(f"q[n a d] k[n b e] indptr[i] offsets[s] {ANGLES} -> {ROTATED}", rotate),
    independent_rows=False,
    sizes={"s": (1, 3, 2), "i": lambda sizes: sizes["s"] + 1},
    where=f"d >= {ROTATED_CHANNELS}; e >= {ROTATED_CHANNELS}",
    scalars={**LLAMA, "rope_scale": 4.0, "rotary_dim": ROTATED_CHANNELS, "interleave": False},
    draws={"q": heads_drawn, "k": heads_drawn, **dict.fromkeys(("pos_ids", "indptr", "offsets"), offsets_drawn)},
    adversarial={"tiny": {"scale": 1e-3}, "outlier": {"outlier": 300.0}},
    unusual={"nan": ("q", "k"), "large": ("q", "k"), "small": ("q", "k")},
)
# Rotated, multiplied by a scale and stored in e4m3, like the channels that are not rotated; or written to pages.

SLACK = 2.0**-22  # error relative to the largest channel of a row, as float32 products and sums lose


def rotated_codes(
    wide: Wide,
    *,
    change_scale: Callable[[float], float] = lambda scale: scale,  # of codes
    rounding: str = NEAREST,  # of codes
    change_plain: Part = same,  # changes channels that are not rotated
    key_parts: str = "nope rope",  # their order in the cache
    where: Callable[[Wide], tuple[torch.Tensor, torch.Tensor]] = placed_in_pages,  # pages and rows of the tokens
    **changes: Any,  # noqa: ANN401 - of a rotation
) -> Tensors:
    """Float8 codes of `x * scale`, x rotated or plain; with pages, keys (plain channels first) and values there.

    In float64 also `@low` and `@high`, the codes that a correct kernel may store. Mutants change keywords.
    """
    values = {f"{name}_rope": rotate(wide, **changes)[f"{name}_out"] for name in "qk"}
    values |= {name: change_plain(wide[name]) for name in ("q_nope", "k_nope", "v") if name in wide}
    outputs: Tensors = {}
    codes: Tensors = {}
    bounds: dict[str, Bounds | tuple[()]] = dict.fromkeys(values, ())
    for name, value in values.items():
        scale = change_scale(wide.number("quant_scale_q" if name[0] == "q" else "quant_scale_kv", 1.0))
        codes[name] = E4M3.encode(value * scale, rounding=rounding)
        if wide.dtype == torch.float64:
            slack = torch.zeros_like(value)
            if name.endswith("rope"):
                source = wide[name[0]].abs()
                slack = value.abs() * ROUNDED + source.amax(-1, keepdim=True).reshape_as(value[..., :1]) * SLACK
            bounds[name] = around(value * scale, (slack + value.abs() * NEAR) * abs(scale))
        if f"{name}_out" in wide.definition.outputs:
            outputs |= coded_output(wide, f"{name}_out", codes[name], form=E4M3, bounds=bounds[name] or None)
    if "k_cache" in wide:
        place = where(wide)
        first, second = (f"k_{part}" for part in key_parts.split())
        keys = torch.cat([codes[first], codes[second]], -1)
        of_keys = [torch.cat(ends, -2) for ends in zip(bounds[first], bounds[second], strict=True)]
        for name, new, of_new in (("k_cache", keys, of_keys), ("v_cache", codes["v"], bounds["v"])):
            cache = wide.given(name).view(torch.uint8)
            outputs[name] = E4M3.decode(cache.index_put(place, new)).to(wide.dtype)
            for what, end in zip(("low", "high"), of_new, strict=False):
                outputs[f"{name}@{what}"] = E4M3.order(cache)[..., None].index_put(place, end)
    return outputs


DRAWS = {"q": heads_drawn, "k": heads_drawn, "cos_sin_cache": cos_sin_drawn, "positions": positions_drawn}
QUANTISED: dict[str, Any] = {
    "synonyms": {"q": "q_rope", "k": "k_rope", "positions": "pos_ids"},
    "scalars": {"is_neox": True, "quant_scale_q": 0.75, "quant_scale_kv": 1.5},
    "draws": DRAWS,
    "exact_on_gpu": lambda _: False,
    "independent_rows": False,
    "where": "r % 2 == 0; r <= d",
    "gates": dict.fromkeys(
        ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out", "k_cache", "v_cache"),
        Exact(EITHER, order=E4M3.order),
    ),
}
CONTROLS = "is_neox? quant_scale_q? quant_scale_kv?"
ROPE_CODES = Rope(
    "rope",
    *(
        Form(
            f"q[n a d] k[n {b}d] q_nope[n a e] k_nope[n {b}e] cos_sin_cache[p r] positions[n] {CONTROLS}"
            f" -> q_rope_out[n a d] k_rope_out[n {b}d] q_nope_out[n a e] k_nope_out[n {b}e]",
            rotated_codes,
        )
        for b in ("b ", "")
    ),
    sizes={**dict.fromkeys("ape", ()), "b": key_heads},
    bounded="b",
    **QUANTISED,
)

ROPE_PAGES = PageAppend(
    "rope",
    Form(
        "q[t a d] k[t h d] q_nope[t a e] k_nope[t h e] v[t h f] cos_sin_cache[m r] pos_ids[t] k_cache[p s h f]"
        f" v_cache[p s h f] kv_indices[i] kv_indptr[c] batch_indices[t] positions[t] {CONTROLS}"
        " -> q_rope_out[t a d] q_nope_out[t a e]",
        partial(rotated_codes, positions="pos_ids"),
    ),
    sizes={
        **dict.fromkeys("tpicbs", ()),
        "e": lambda at: at["e"] if at["e"] > 1 else 32,
        "m": lambda at: max(at["m"], 600),  # so that positions do not fit in a byte
        "f": lambda at: at["d"] + at["e"],
    },
    bounded="em",
    coupled=True,
    writes=("k_cache", "v_cache"),
    **QUANTISED | {"synonyms": {"q": "q_rope", "k": "k_rope"}, "draws": DRAWS | {"pos_ids": positions_drawn}},
)
PLAIN: Any = {
    "draws": DRAWS,
    "lossless": lambda _: {**dict.fromkeys("qk", full(0, most=3)), "cos_sin_cache": full(0, most=9)},
    "gates": {"q_out": Close(), "k_out": Close()},
}
ROPE_FLAT = Rope(
    "rope",
    Form("positions[n] q[n w] k[n x] head_size cos_sin_cache[p r] is_neox? -> q_out[n w] k_out[n x]", rotate),
    synonyms={"q": "query", "k": "key", "q_out": "query_out", "k_out": "key_out"},
    sizes={"p": lambda at: at["p"]},  # set by the cases
    scalars={"is_neox": True},
    sizes_in_numbers=("head_size",),
    where="w % head_size == 0; x % head_size == 0; r % 2 == 0; r <= head_size",
    requires=lambda one: None if "head_size" in one.const_axes else "nobody states head_size",
    **PLAIN,
)
ROPE = Rope(
    "rope",
    Form(
        "q[n a d] k[n b e] cos_sin_cache[p r] positions[n] -> q_out[n a d] k_out[n b e]",
        rotate,
        constants=("pairing",),
    ),
    family="rope",
    rules=(
        Rule(
            name="pairing",
            label="pairing of channels",
            reader="pairing",
            read="whether halves are cut or joined, or every second channel is taken, viewed, stacked or repeated",
            described=((r"\bneox\b|\bhalves\b", "halves"), (r"\bgpt-?j\b|\bneighbours\b", "interleaved")),
            named=((r"_neox_style(?:_|$)", "halves"), (r"_gptj_style(?:_|$)", "interleaved")),
            defaults={
                "rope.apply_rope_with_cos_sin_cache": ("is_neox", "halves"),
                "rope.apply_rope_with_cos_sin_cache_inplace": ("is_neox", "halves"),
            },
        ),
    ),
    where="r % 2 == 0; r <= d; r <= e",
    sizes={"a": (), "b": key_heads, "p": ()},
    bounded="b",
    **PLAIN,
    mutants=(
        Mutant("rotated the other way", turn=lambda cos, sin: (cos, -sin)),
        Mutant("cosine and sine swapped", turn=lambda cos, sin: (sin, cos)),
        Mutant("the other pairing of channels", right_pairs=False),
        Mutant("position plus one", move=lambda positions, count: (positions + 1).clamp_max(max(count - 1, 0))),
        Mutant(  # positions are taken for 0, 1, 2, ..
            "positions ignored", move=lambda positions, count: torch.arange(len(positions)) % max(count, 1)
        ),
        Mutant("keys not rotated", keys=False),
        altered("angles not scaled", "rope_scale", change=lambda _: 1.0),
        altered("another theta", "rope_theta", change=lambda theta: theta * 1.1),
        Mutant("scale of codes dropped", applies=has("quant_scale_q"), change_scale=lambda _: 1.0),
        Mutant("over the scale of codes", applies=has("quant_scale_q"), change_scale=lambda scale: 1 / scale),
        altered("one scale for both", "quant_scale_kv", change=lambda _: 0.75),
        Mutant("codes cut off", applies=has("quant_scale_q"), rounding=DOWN),
        Mutant("plain channels left out", applies=has("quant_scale_q"), change_plain=lambda x: x * 0),
        Mutant("rotated channels first", applies=has("k_cache"), key_parts="rope nope"),
        altered("always the first sequence's pages", "batch_indices", change=lambda owner: owner * 0),
        Mutant("one row further", applies=has("k_cache"), inputs=lambda wide: in_first_page(wide, 1)),
        altered("values of the next token", "v", change=lambda v: v.roll(1, 0)),
        altered(
            "all frequencies scaled", "low_freq_factor", "high_freq_factor", change=lambda factor: factor + 1e6
        ),
    ),
    other_forms=(ANGLED, ROPE_FLAT, ROPE_CODES, ROPE_PAGES),
)

TURNS = tuple(f"flashinfer.rope:apply_{kind}rope{by}" for kind in ("", "llama31_") for by in ("", "_pos_ids"))


@ROPE.truth("flashinfer", "rope.apply_rope", *TURNS, serves="q k indptr offsets " + BY_THETA, sm=SM75)
@ROPE.truth("flashinfer", "rope.apply_rope_pos_ids", *TURNS, serves="q k pos_ids " + BY_THETA, sm=SM75)
def _flashinfer_angles(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Arguments by keyword; Llama 3.1's function where its factors are inputs."""
    llama = "llama31_" if "low_freq_factor" in inputs else ""
    key = f"flashinfer.rope:apply_{llama}rope{'_pos_ids' if 'pos_ids' in inputs else ''}"
    arguments = {name: value for name, value in inputs.items() if value is not None}
    if "interleave" in arguments:
        arguments["interleave"] = bool(arguments["interleave"])
    return dict(zip(definition.outputs, api[key](**arguments), strict=True))


def one_width(definition: Definition) -> bool:
    """Whether heads of q and of k have the same width."""
    return len({(definition.inputs[name].shape or ("",))[-1] for name in ("q", "k")}) == 1


def fits_sglang(definition: Definition) -> bool:
    """Whether SGLang's package has the kernel: q and k of one dtype and width, the cache in it or in float32."""
    q, k, cache = (definition.inputs[name].dtype for name in ("q", "k", "cos_sin_cache"))
    return q == k and one_width(definition) and q in {"float16", "bfloat16", "float32"} and cache in {q, "float32"}


@ROPE.truth("flashinfer", "apply_rope_with_cos_sin_cache_inplace", "rope", sm=SM75)
@ROPE.truth(
    "sglang", "sgl_kernel.rotary_embedding", "rotary_embedding", accepts=fits_sglang, packages=(KERNELS,), sm=SM80
)
def _in_place(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Pass copies as [tokens, heads * channels], since the call writes to them, and int64 positions."""
    q, k = inputs["q"].clone(), inputs["k"].clone()
    [rotate_in_place] = api.values()
    rows = (q.view(q.shape[0], -1), k.view(k.shape[0], -1))
    positions, cache = inputs["positions"].long(), inputs["cos_sin_cache"]
    rotate_in_place(positions, *rows, q.shape[-1], cache, pairs_halves(definition))
    return {"q_out": q, "k_out": k}


@ROPE.truth("sglang_native", "rotary_embedding.apply_rotary_emb", "apply_rotary_emb")
def _sglang_native(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Compute in float32: the native form takes cosines in the data's dtype, unlike SGLang's kernels."""
    cache = inputs["cos_sin_cache"]
    cos, sin = cache[inputs["positions"].long()].float().chunk(2, dim=-1)
    halves = pairs_halves(definition)
    width = cache.shape[-1]

    outputs = {}
    for name in ("q", "k"):
        x = inputs[name]
        turned = api["apply_rotary_emb"](x[..., :width].float(), cos, sin, halves)
        outputs[f"{name}_out"] = torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)
    return outputs


@ROPE.truth(
    "liger",
    "rope_forward",
    "rope",
    accepts=lambda definition: one_width(definition) and pairs_halves(definition),
    sm=SM80,
)
def _liger(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Pass Liger copies, which its Triton kernel rotates in place by halves.

    They are [batch, heads, tokens, width], with batch 2 if the number of tokens is even, so that both are tried.
    Cosines and sines are repeated to the full width, since releases differ in what they read.
    """
    angles = inputs["cos_sin_cache"][inputs["positions"].long()].float()
    batch = 1 if angles.shape[0] % 2 else 2
    cos, sin = (half.repeat(1, 2) for half in angles.chunk(2, dim=-1))
    rows = (inputs["q"].clone(), inputs["k"].clone(), cos, sin)
    q, k, cos, sin = (one.reshape(batch, -1, *one.shape[1:]) for one in rows)
    turned = api["rope"](q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return {"q_out": turned[0].transpose(1, 2).flatten(0, 1), "k_out": turned[1].transpose(1, 2).flatten(0, 1)}


def read_rope(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """Head size, rotary size, style and class of one of SGLang's rotary embeddings."""
    style = "neox" if module.is_neox_style else "gptj"
    sizes = {"head_dim": module.head_size, "rotary_dim": module.rotary_dim}
    return {**sizes, "style": style, "class": type(module).__name__}


PAIRS = {  # style -> which channels are rotated with which, in words, and as two slices
    "neox": ("channel i with channel i + rotary_dim / 2", ": ROTARY_DIM // 2", "ROTARY_DIM // 2 : ROTARY_DIM"),
    "gptj": ("neighbouring channels", "0:ROTARY_DIM:2", "1:ROTARY_DIM:2"),
}


def rope_drafts(call: KernelCall, _: Choice) -> Iterator[Draft]:
    """Draft of a rotary embedding from a cache of cosines and sines."""
    pairs = dict(zip(("pairs", "first", "second"), PAIRS[call["style"]], strict=True))
    yield draft(ROPE.op_type, "rope", {**dict(call.facts), **pairs})


def rope_terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    """Facts of transformers' embedding as SGLang's call has them: `neox` if loading reorders channels to that."""
    stored = facts["style"]
    loaded = "neox" if stored == "gptj" and "rotary halves" in evidence.loads else stored
    return {"rotary_dim": facts["rotary_dim"], "style": loaded}


def rope_differs(call: KernelCall, evidence: Evidence) -> str | None:
    """How transformers' model differs from the call, or None; its head_dim may count only rotated channels."""
    wrong = compared_with("rotary", rope_terms, counted=False)(call, evidence)
    heads = {module.facts["head_dim"] for module in evidence.of("rotary")}
    heads |= {module.facts["qk_dim"] for module in evidence.of("attention")}
    if wrong is None and call["head_dim"] not in heads:
        return f"head_dim: SGLang {call['head_dim']}, transformers {sorted(heads)}"
    return wrong


ROPE.extraction = Extraction(
    readers={"RotaryEmbedding": ("rope", read_rope)},
    calls={"rope": lambda module, _: call_of(module, "rotary", "head_dim", "rotary_dim", "style")},
    differs={"rotary": rope_differs},
    drafts={"rotary": rope_drafts},
)
