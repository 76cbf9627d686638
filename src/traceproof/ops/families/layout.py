"""Around attention: keys and values written to a paged cache, partial results merged, streams mixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.ops.adapter import SM75, SM80, Api, Definition, Given, Outputs, dim
from traceproof.ops.base import Tensors, Values, rounded, specified
from traceproof.ops.cases import SEEN, Case
from traceproof.ops.compare import Close, Exact
from traceproof.ops.families.blockscaled import GATES as CODES
from traceproof.ops.families.blockscaled import MUTANTS as CODER_MUTANTS
from traceproof.ops.families.blockscaled import NEAR, NVFP4, Bounds, Coder, around, between, under_scales
from traceproof.ops.formats import E2M1, E4M3, Format, pack, unpack
from traceproof.ops.formula import Form, Mutant, Part, Size, Wanted, Wide, altered, has, has_not, same
from traceproof.ops.gates import sigmoid
from traceproof.ops.lossless import full
from traceproof.ops.op import Op

# page_append

Places = tuple["torch.Tensor", "torch.Tensor"]  # page of each token and row in that page, int64 [t]
# Per case: sequences, tokens appended to each, pages of each in addition to those that these tokens fill.
SIZES = {"small": ((1, 1, 1), (2, 3, 2)), "medium": ((3, 5, 2), (4, 16, 3)), "large": ((16, 8, 4), (8, 64, 6))}
GAPS = 3  # pages that no sequence has
PAGE = 4  # rows of a page, where a definition leaves them open
CACHES = {"k_cache": "append_key", "v_cache": "append_value", "ckv_cache": "append_ckv", "kpe_cache": "append_kpe"}
PAGES = ("k_cache", "paged_k_cache", "ckv_cache")  # caches whose second axis is the page's rows


def page_size(wide: Wide) -> int:
    """Rows (tokens) per page of the caches."""
    return next(wide.given(name).shape[1] for name in PAGES if name in wide)


def places(wide: Wide) -> Places:
    """(page, row) of each token: (kv_indices[kv_indptr[b] + p // size], p % size) for position p of sequence b.

    With `slot_mapping` they are (slot // size, slot % size); a slot of -1, which is none, has page -1.
    """
    size = page_size(wide)
    if "slot_mapping" in wide:
        slots = wide["slot_mapping"].long()
        return torch.where(slots < 0, slots, slots // size), slots % size
    positions, starts = wide["positions"].long(), wide["kv_indptr"].long()[wide["batch_indices"].long()]
    return wide["kv_indices"].long()[starts + positions // size], positions % size


def page_and_row_exchanged(wide: Wide) -> Places:
    """Mutant of `places`: position % size chooses the page in the table, position // size the row in it."""
    size, positions = page_size(wide), wide["positions"].long()
    most = len(wide["kv_indices"]) - 1
    return wide["kv_indices"].long()[(positions % size).clamp_max(most)], (positions // size) % size


def append(
    wide: Wide,
    *,
    where: Callable[[Wide], Places] = places,
    write: Callable[..., object] = lambda cache, pages, rows, new: cache.index_put_((pages, rows), new),
) -> Tensors:
    """Copies of the caches with the new tokens written to their places; nothing is computed or rounded."""
    outputs = {f"{name}_out": wide[name].clone() for name in CACHES if name in wide}
    for name, cache in outputs.items():
        write(cache, *where(wide), wide[CACHES[name.removesuffix("_out")]])
    return outputs


def in_first_page(wide: Wide, step: int) -> dict[str, torch.Tensor]:
    """A mutant's positions: moved by `step` rows, and always in the first page of the sequence."""
    return {"positions": (wide["positions"].long() + step).clamp_min(0) % page_size(wide)}


# Per nvfp4 cache the names of the new rows, the cache, its block scales and the scale of the whole cache.
CODED = (
    ("append_key", "paged_k_cache", "k_scale_cache", "k_scale"),
    ("append_value", "paged_v_cache", "v_scale_cache", "v_scale"),
    ("append_ckv", "ckv_cache", "ckv_sf_cache", "ckv_scale"),
)
WHOLES = ("k_scale", "v_scale", "ckv_scale", "kpe_scale")  # scales of whole caches
# A correct kernel divides by the whole cache's scale, or multiplies by its approximate reciprocal.
NEARLY = 2 * NEAR


def append_coded(
    wide: Wide,
    *,
    where: Callable[[Wide], Places] = places,  # pages and rows of the tokens
    write: bool = True,  # whether anything is written
    order: Part = same,  # changes the codes
    layout: Part = same,  # changes the codes of block scales
    power: int = -1,  # of the whole cache's scale, by which rows are multiplied
    change_rows: Part = same,
    **changes: Any,  # noqa: ANN401 - a Coder's fields
) -> Tensors:
    """Caches with the tokens as nvfp4 `code * block scale * whole scale`; `kpe_cache` as e4m3 `code * whole`."""
    pages, rows = where(wide)
    kept = pages >= 0
    place, outputs = (pages[kept], rows[kept]), Tensors()

    def store(name: str, new: torch.Tensor, form: Format, bounds: Bounds | None) -> None:
        """Write codes to a copy of a cache; to `@low` and `@high` the codes that a correct kernel may store."""
        packed, old = wide.given(name).dtype is torch.uint8, wide.given(name).view(torch.uint8)
        cache = old.index_put(place, pack(new) if packed else new) if write else old
        outputs[f"{name}_out"] = cache if packed else form.decode(cache).to(wide.dtype)
        ranks = form.order(unpack(old) if packed else old)
        for what, ends in zip(("low", "high"), bounds or (), strict=False):
            outputs[f"{name}_out@{what}"] = torch.stack([ranks] * ends.shape[-1], -1).index_put(place, ends)

    exact = wide.dtype == torch.float64
    coder = Coder(NVFP4, **changes)
    for new, cache, scales, whole in CODED:
        if cache in wide:
            x, factor = change_rows(wide[new])[kept], wide.factor(whole)
            codes, of_blocks = coder.encode(x * factor**power)
            bounds, of_scales = coder.allowed(x / factor, NEARLY) if exact else (None, None)
            store(cache, order(codes), E2M1, bounds)
            store(scales, layout(of_blocks), E4M3, of_scales)
            if exact:
                places = torch.arange(wide.given(scales).numel()).view(wide.given(scales).shape)
                outputs[f"{cache}_out@place"] = places.repeat_interleave(NVFP4.width, -1).to(x.device)
    if "kpe_cache" in wide:
        x = wide["append_kpe"][kept] * wide.factor("kpe_scale") ** power
        store("kpe_cache", E4M3.encode(x), E4M3, around(x, NEARLY * x.abs()) if exact else None)
    return outputs


def cache_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor | float:
    """Draw normal rows and caches, whole caches' scales, and for caches in narrow formats any code but NaN."""
    if wanted.name in WHOLES:
        numbers = draw.uniform(wanted.name, wanted.shape or (1,), low=0.005, high=0.02)
        return numbers if wanted.definition.inputs[wanted.name].shape is not None else float(numbers[0])
    if wanted.dtype is torch.uint8:
        return draw.integers(wanted.name, wanted.shape, low=0, high=256).to(torch.uint8)
    if wanted.dtype is torch.float8_e4m3fn:
        made = draw.integers(wanted.name, wanted.shape, low=0, high=256).to(torch.uint8)
        return torch.where(made & 127 == 127, 0, made).view(wanted.dtype)
    made = draw.normal(wanted.name, wanted.shape, wanted.dtype)
    made.view(-1)[::97] *= 0  # zeros of both signs
    return made


def slots_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """A distinct slot per token, in no order; every fifth token has none (-1)."""
    pages, size = wanted.shape_of("paged_k_cache")[:2]
    slots = draw.orders(wanted.name, (pages * size,))[: wanted.shape[0]]
    slots[2::5] = -1
    return slots.to(wanted.dtype)


class PageAppend(Op):
    """Appending to a paged cache: tokens begin anywhere in a sequence, pages are in any order, with gaps."""

    counted, roomy = "ticb", "p"

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Ordinary sizes, no token at all, and tokens that begin in the last row of a page."""
        ordinary = {f"{size}-{index}": counts for size in sizes for index, counts in enumerate(SIZES[size])}
        for name, counts in {**ordinary, "edge-empty": (1, 0, 1)}.items():
            yield self._case(definition, name, counts, seed)
        yield self._case(definition, "adversarial-crossing", (5, 4, 3), seed, crossing=True)

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """A case of `count` sequences of one token each; with `long` of one sequence of `count` tokens."""
        counts = (1, count, 1) if long else (count, 1, 2)
        return replace(self._case(definition, case.id, counts, case.seed), size=case.size)

    def _case(
        self, definition: Definition, name: str, counts: tuple[int, int, int], seed: int, **params: bool
    ) -> Case:
        """A case of (sequences, tokens for each, further pages for each), with the axes that follow from them."""
        fixed, (batch, tokens, further) = self.fixed(definition), counts
        batch = fixed.get("b", fixed.get("c", batch + 1) - 1)
        tokens = fixed.get("t", batch * tokens) // max(1, batch)
        size = fixed.get("s", PAGE)
        pages = further + tokens // size
        if {"i", "p"} & fixed.keys():  # as many as there are, but enough for tokens that begin in a last row
            most = fixed.get("i", min(batch * pages, fixed.get("p", 0) - GAPS))
            pages = max(most // max(1, batch), -(-(tokens + size - 1) // size))
        axes = {"t": batch * tokens, "p": batch * pages + GAPS, "i": batch * pages, "c": batch + 1, "b": batch}
        counted = {"batch": batch, "tokens": tokens, "pages": pages, **params}
        return self.settled(definition, self.case(definition, name, axes | {"s": size}, seed, counted))

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Draw keys, values and caches, and the places of tokens and pages as the case's params say."""
        batch, tokens, pages = (int(case.params[name]) for name in ("batch", "tokens", "pages"))
        shapes, dtypes = specified(definition, case, definition.inputs)
        pool, size = next(shapes[name] for name in PAGES if name in shapes)[:2]
        sequence = torch.arange(batch, device=draw.device)
        # Of each two sequences one takes pages from the other, so that kv_indptr does not follow from the shapes.
        spare = max(0, pages - -(-(tokens + size - 1) // size))
        moved = draw.integers("moved", (batch, 1), torch.int64, low=0, high=spare + 1)
        moved = torch.where(sequence[:, None] < batch - batch % 2, moved[sequence // 2 * 2], 0)
        held = pages + moved * (1 - 2 * (sequence[:, None] % 2))  # pages of each sequence
        starts = draw.integers("starts", (batch, 1), torch.int64, low=0, high=1 << 30) % (size * held - tokens + 1)
        if case.params.get("crossing"):
            starts = torch.full_like(starts, size - 1)
        order = draw.orders("order", (batch * tokens,))  # tokens come in no order
        layout = {
            "batch_indices": sequence.repeat_interleave(tokens)[order],
            "positions": (starts + torch.arange(tokens, device=draw.device)).reshape(-1)[order],
            "kv_indices": draw.orders("pages", (pool,))[: batch * pages],
            "kv_indptr": torch.cat([held.new_zeros(1), held[:, 0].cumsum(0)]),
            "kv_last_page_len": ((starts[:, 0] + tokens - 1) % size + 1).clamp_min(1),
        }
        values: Values = {}
        for name, spec in definition.inputs.items():
            if name in layout:
                values[name] = layout[name].to(dtypes[name])
            elif name in self.draws or name in self.scalars:
                values[name] = self.value(definition, name, spec, case, draw)
            else:
                values[name] = cache_drawn(draw, Wanted(definition, case, name, shapes[name], dtypes[name]))
        return values


TABLE = "batch_indices[t] positions[t]"
INDEX = "kv_indices[i] kv_indptr[c] kv_last_page_len[b]?"
BOTH = (
    "paged_k_cache[p s h x] paged_v_cache[p s h x] k_scale_cache[p s h g] v_scale_cache[p s h g]",
    "paged_k_cache_out[p s h x] paged_v_cache_out[p s h x] k_scale_cache_out[p s h g] v_scale_cache_out[p s h g]",
)
LATENT = (
    "ckv_cache[p s x] ckv_sf_cache[p s g] kpe_cache[p s e]",
    "ckv_cache_out[p s x] ckv_sf_cache_out[p s g] kpe_cache_out[p s e]",
)
IN_CODES = ("paged_k_cache", "paged_v_cache", "k_scale_cache", "v_scale_cache")
# Sizes that follow from the d values of a row: x bytes of codes, g block scales.
PACKED: Mapping[str, Size] = {"x": lambda at: at["d"] // 2, "g": lambda at: at["d"] // NVFP4.width}
UNREAD = {"kv_last_page_len": "positions say it"}
CODED_FACTS: dict[str, Any] = {
    "coupled": True,
    "where": "d % 16 == 0",
    "unread": UNREAD,
    "sizes": {**dict.fromkeys("tpicbs", ()), "o": (1,), **PACKED},
    "independent_rows": False,
    "gates": {
        "paged_k_cache_out paged_v_cache_out ckv_cache_out": CODES[E2M1],
        "k_scale_cache_out v_scale_cache_out ckv_sf_cache_out kpe_cache_out": CODES[E4M3],
    },
    "follows": {f"{cache}_out": (f"{scales}_out", under_scales(E4M3.order)) for _, cache, scales, _ in CODED},
    "mutants": (
        *CODER_MUTANTS,
        Mutant("whole cache's scale dropped", power=0),
        Mutant("times the whole cache's scale", power=1),
        Mutant("rows of the next token", change_rows=lambda rows: rows.roll(1, 0)),
        Mutant("nothing appended", write=False),
        Mutant("page and row exchanged", applies=has("positions"), where=page_and_row_exchanged),
        altered("slots of -1 taken for the last page", "slot_mapping", change=lambda at: at.clamp_min(0)),
    ),
}
CODED_PAGES = PageAppend(
    "page_append",
    Form(
        f"append_key[t h d] append_value[t h d] {TABLE} {BOTH[0]} {INDEX} k_scale v_scale -> {BOTH[1]}",
        append_coded,
    ),
    Form(
        f"append_ckv[t d] append_kpe[t e] {TABLE} {LATENT[0]} {INDEX} ckv_scale kpe_scale -> {LATENT[1]}",
        append_coded,
    ),
    **CODED_FACTS,
)
CODED_SLOTS = Op(
    "page_append",
    Form(
        f"append_key[t h d] append_value[t h d] slot_mapping[t] {BOTH[0]} k_scale[o] v_scale[o] -> {BOTH[1]}",
        append_coded,
    ),
    **CODED_FACTS
    | {
        "sizes": {**PACKED, "t": (3, 1, 7, 12), "o": (1,), "p": lambda at: at["t"] // at["s"] + 2},
        "roomy": "p",
        "draws": {"slot_mapping": slots_drawn, f"k_scale v_scale {' '.join(IN_CODES)}": cache_drawn},
        "adversarial": {"tiny": {"scale": 1e-3}, "outlier": {"outlier": 300.0}},
    },
)

PAGE_APPEND = PageAppend(
    "page_append",
    Form(
        f"append_key[t h d] append_value[t h d] {TABLE} k_cache[p s h d] v_cache[p s h d] {INDEX}"
        " -> k_cache_out[p s h d] v_cache_out[p s h d]",
        append,
    ),
    Form(
        f"append_ckv[t d] append_kpe[t e] {TABLE} ckv_cache[p s d] kpe_cache[p s e] {INDEX}"
        " -> ckv_cache_out[p s d] kpe_cache_out[p s e]",
        append,
    ),
    family="attention",
    coupled=True,
    unread=UNREAD,
    sizes=dict.fromkeys("tpicbs", ()),
    gates={f"{name}_out": Exact() for name in CACHES},
    independent_rows=False,
    other_forms=(CODED_PAGES, CODED_SLOTS),
    mutants=(
        altered("pages in their own order", "kv_indices", change=lambda pages: torch.arange(len(pages))),
        Mutant("one row further", inputs=lambda wide: in_first_page(wide, 1)),
        altered("always the first sequence", "batch_indices", change=lambda owner: owner * 0),
        Mutant("always the first page of a sequence", inputs=lambda wide: in_first_page(wide, 0)),
        Mutant(
            "keys for values", applies=has("append_key"), inputs=lambda wide: {"append_value": wide["append_key"]}
        ),
        altered("values of the next token", "append_value", "append_kpe", change=lambda new: new.roll(1, 0)),
        altered("tokens in the opposite order", *CACHES.values(), change=lambda new: new.flip(0)),
        Mutant("nothing appended", write=lambda *_: None),
        altered("the rest set to zero", *CACHES, change=lambda cache: torch.zeros_like(cache)),
        Mutant("page and row exchanged", where=page_and_row_exchanged),
    ),
)
FLASHINFER_APPEND = "flashinfer.page:append_paged_kv_cache"
INDEX_PUT = "torch:index_put"
NEW = ("append_key", "append_value", "batch_indices", "positions")
TABLES = ("kv_indices", "kv_indptr", "kv_last_page_len")
HEAD_DIMS = (64, 128, 256, 512)  # that FlashInfer's kernel is compiled for


@PAGE_APPEND.truth(
    "flashinfer",
    "page.append_paged_kv_cache",
    FLASHINFER_APPEND,
    rows=None,
    accepts=lambda one: "kv_last_page_len" in one.inputs and dim(one, "append_key", -1) in HEAD_DIMS,
    sm=SM75,
)
def _flashinfer_append(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Pass copies, since the call writes to the caches; it is not made for no tokens."""
    keys, values = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    new = [inputs[name] for name in NEW]
    if len(new[0]):
        api[FLASHINFER_APPEND](*new, (keys, values), *(inputs[name] for name in TABLES))
    return {"k_cache_out": keys, "v_cache_out": values}


@PAGE_APPEND.truth("torch", "index_put", INDEX_PUT, rows=None)
def _pytorch_append(api: Api, _: Definition, inputs: Given) -> Outputs:
    positions, size = inputs["positions"].long(), inputs["k_cache"].shape[1]
    first = inputs["kv_indptr"].long()[inputs["batch_indices"].long()]
    place = (inputs["kv_indices"].long()[first + positions // size], positions % size)
    keys = api[INDEX_PUT](inputs["k_cache"], place, inputs["append_key"])
    return {"k_cache_out": keys, "v_cache_out": api[INDEX_PUT](inputs["v_cache"], place, inputs["append_value"])}


IN_LATENT = ("ckv_cache", "ckv_sf_cache", "kpe_cache")
ROWS = ("append_key", "append_value", "append_ckv", "append_kpe", "batch_indices", "positions", "slot_mapping")
coded = partial(PAGE_APPEND.truth, "flashinfer", sm=SM80)
BY_TABLE = "page.nvfp4_quantize_append_paged_kv_cache"
BY_SLOT = f"{BY_TABLE}_with_slot_mapping"
LATENT_ROWS = "page.nvfp4_quantize_append_paged_mla_kv_cache"


@coded(BY_TABLE, f"flashinfer.{BY_TABLE.replace('.', ':')}", serves=CODED_PAGES.forms[0].names)
@coded(BY_SLOT, f"flashinfer.{BY_SLOT.replace('.', ':')}", serves=CODED_SLOTS.forms[0].names)
@coded(
    LATENT_ROWS,
    f"flashinfer.{LATENT_ROWS.replace('.', ':')}",
    serves=CODED_PAGES.forms[1].names,
    accepts=lambda definition: (dim(definition, "append_ckv", 1), dim(definition, "append_kpe", 1)) == (512, 64),
)
def _flashinfer_coded(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Pass rows, their places, caches, page table, whole caches' scales (tensors only with slot_mapping)."""
    [append_codes] = api.values()
    names = IN_LATENT if "ckv_cache" in inputs else IN_CODES
    caches = [inputs[name].clone() for name in names]
    parts = caches if "ckv_cache" in inputs else [tuple(caches[:2]), tuple(caches[2:])]
    rows = [inputs[name] for name in ROWS if name in inputs]
    scales = [inputs[name] for name in WHOLES if name in inputs]
    if "slot_mapping" in inputs:
        append_codes(*rows, *parts, *scales)
    else:
        append_codes(*rows, *parts, *(inputs[name] for name in TABLES), *map(float, scales))
    return {f"{name}_out": cache for name, cache in zip(names, caches, strict=True)}


# cascade_merge

# values [n i t d] and base-2 logarithms [n i t]; merged ones have no i
States = tuple["torch.Tensor", "torch.Tensor"]
Merge = Callable[["torch.Tensor", "torch.Tensor"], States]


def merged(v: torch.Tensor, s: torch.Tensor) -> States:
    """`v = sum_i 2^(s_i - s) v_i`, `s = log2(sum_i 2^s_i)`; the largest s_i is subtracted first against overflow.

    An empty state has s = -inf. Where all states of a row are empty, v is 0 and s is -inf.
    """
    top = s.amax(1, keepdim=True)
    weights = torch.exp2(s - top.clamp_min(torch.finfo(s.dtype).min))
    total = weights.sum(1)
    some = torch.where(total > 0, total, 1.0)
    return (v * weights.unsqueeze(-1)).sum(1) / some.unsqueeze(-1), top.squeeze(1) + torch.log2(some)


def merged_by_e(v: torch.Tensor, s: torch.Tensor) -> States:
    """Mutant of `merged` that takes the base-2 logarithms for natural ones."""
    return (v * torch.softmax(s, 1).unsqueeze(-1)).sum(1), torch.logsumexp(s, 1)


def merged_undivided(v: torch.Tensor, s: torch.Tensor) -> States:
    """Mutant of `merged` that does not divide the values by the sum of the weights."""
    weights = torch.exp2(s - s.amax(1, keepdim=True)).unsqueeze(-1)
    return (v * weights).sum(1), merged(v, s)[1]


def states(wide: Wide) -> States:
    """(v, s) of all states of each row, stacked from two inputs or from one that holds them all."""
    for first, second in (("_a", "_b"), ("", "_other")):
        if f"v{second}" in wide:
            v, s = (torch.stack([wide[f"{name}{first}"], wide[f"{name}{second}"]], 1) for name in "vs")
            return v, s
    return wide["v"], wide["s"]


def cascade(wide: Wide, *, merge: Merge = merged, masked: bool = True) -> Tensors:
    """The states of each row merged into one; rows where `mask` is False keep `v` and `s`."""
    v, s = merge(*states(wide))
    if masked and "mask" in wide:
        merged_rows = wide["mask"].bool()
        v = torch.where(merged_rows[:, None, None], v, wide["v"])
        s = torch.where(merged_rows[:, None], s, wide["s"])
    return {name: v if name[0] == "v" else s for name in wide.definition.outputs}


def logarithms_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw logarithms of mean 3, deviation 4 (as of parts of a context), or as the case says; -inf: empty."""
    name, params = wanted.name, wanted.params
    logs = draw.normal(name, wanted.shape, wanted.dtype)
    logs = logs * float(params.get("spread", 4.0)) + float(params.get("level", 3.0))
    if "nothing" in params:
        logs[::2] = float("-inf")
    if "empty" in params and logs.numel() and name in {"s", "s_a"}:
        stacked = name == "s" and "num_states" in wanted.definition.axes
        if not stacked:
            logs[::2] = float("-inf")
        elif logs.shape[1] > 1:  # another state of the row has something
            logs[::2, 0] = float("-inf")
    return logs


class CascadeMerge(Op):
    """Merging of states; errors of a merged logarithm are compared with the largest logarithm given."""

    def baseline(self, definition: Definition, inputs: Values) -> Tensors:
        """The float32 formula; logarithms are exact ones plus max(8, 2 sqrt(n)) roundings of the largest given.

        Where one of the n states outweighs the others, the float32 formula returns its logarithm without any
        error. Other correct kernels convert between the bases 2 and e, and merge state by state, with a rounding
        each time.
        """
        baselines = super().baseline(definition, inputs)
        merged_s = next((name for name in definition.outputs if name[0] == "s"), None)
        if merged_s is None:
            return baselines
        exact = self.oracle(definition, inputs)[merged_s]
        logs = [value for name, value in inputs.items() if name[0] == "s" and isinstance(value, torch.Tensor)]
        largest = max([1.0, *(float(value[value.isfinite()].abs().amax()) for value in logs if value.numel())])
        states = max([2, *(value.shape[1] for value in logs if value.dim() == 3)])
        baselines[merged_s] = (exact + max(8, 2 * math.sqrt(states)) * 2.0**-24 * largest).float()
        return baselines


LEVELS = "s s_a s_b s_other"
CASCADE_MERGE = CascadeMerge(
    "cascade_merge",
    Form("v_a[n t d] s_a[n t] v_b[n t d] s_b[n t] -> v_merged[n t d] s_merged[n t]", cascade),
    Form("v[n i t d] s[n i t] -> v_merged[n t d] s_merged[n t]", cascade),
    Form("v[n t d] s[n t] v_other[n t d] s_other[n t] mask[n]? -> v_out[n t d] s_out[n t]", cascade),
    family="attention",
    # Only values become NaN or extreme: an infinite logarithm weighs all or nothing, by how others are scaled.
    unusual=dict.fromkeys(("nan", "large", "small", SEEN), ("v", "v_a", "v_b", "v_other")),
    sizes={"i": (3, 1, 7, 2)},
    lossless={"v v_a v_b v_other": full(0), LEVELS: 0.0},
    lossless_sizes={"i": 2},  # of three, a kernel that merges one by one weighs by thirds
    gates={"s_merged s_out": Close()},
    draws={
        "mask": lambda draw, wanted: draw.integers("mask", wanted.shape, torch.int32, low=0, high=2).bool(),
        LEVELS: logarithms_drawn,
    },
    adversarial={
        "near": {"spread": 0.05},
        "far": {"spread": 60.0},
        "high": {"level": 300.0},  # 2^s overflows float32
        "empty": {"empty": 1.0},
    },
    # rows of which all states are empty (have seen no key), which not every reference can merge
    extremes={"empty": {"nothing": True}},
    mutants=(
        Mutant("natural logarithms", merge=merged_by_e),
        Mutant("weights of natural logarithms", merge=lambda v, s: (merged_by_e(v, s)[0], merged(v, s)[1])),
        Mutant(
            "natural logarithm of the sum",
            merge=lambda v, s: (merged(v, s)[0], merged(v, s)[1] / math.log2(math.e)),
        ),
        Mutant("equal weights", merge=lambda v, s: (v.mean(1), merged(v, s)[1])),
        Mutant("not divided by the weights", merge=merged_undivided),
        Mutant("the largest logarithm alone", merge=lambda v, s: (merged(v, s)[0], s.amax(1))),
        Mutant("logarithms added", merge=lambda v, s: (merged(v, s)[0], s.sum(1))),
        Mutant("the states' weights exchanged", merge=lambda v, s: (merged(v, s.flip(1))[0], merged(v, s)[1])),
        Mutant(  # the largest is not subtracted first
            "overflow",
            merge=lambda v, s: (
                (v * s.exp2()[..., None]).sum(1) / s.exp2().sum(1)[..., None],
                s.exp2().sum(1).log2(),
            ),
        ),
        Mutant("only the first state", merge=lambda v, s: (v[:, 0], s[:, 0])),
        Mutant("mask not looked at", applies=has("mask"), masked=False),
    ),
)
PAIR, MANY = "v_a s_a v_b s_b -> v_merged s_merged", "v s -> v_merged s_merged"
IN_PLACE = "v s v_other s_other [mask] -> v_out s_out"
SOFTMAX, LOGSUMEXP = "torch:softmax", "torch:logsumexp"
CASCADE_MERGE.called("cascade:merge_state", PAIR, rows="v_a", sm=SM75)
CASCADE_MERGE.called("cascade:merge_states", MANY, rows="v", sm=SM75)
CASCADE_MERGE.called("cascade:merge_state_in_place", IN_PLACE, written="v s", rows="v", sm=SM75)


@CASCADE_MERGE.truth("torch", "softmax", SOFTMAX, LOGSUMEXP, serves=f"{PAIR} | {MANY}", rows=None)
def _pytorch_merge(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Compute in float32, as kernels do; softmax's NaN becomes 0 where all states are empty."""
    if "v" in inputs:
        v, s = inputs["v"].float(), inputs["s"]
    else:
        v, s = (torch.stack([inputs[f"{one}_a"].float(), inputs[f"{one}_b"].float()], 1) for one in "vs")
    scaled = s * math.log(2.0)
    merged_v = (v * api[SOFTMAX](scaled, 1).nan_to_num(0.0).unsqueeze(-1)).sum(1)
    return rounded(definition, {"v_merged": merged_v, "s_merged": api[LOGSUMEXP](scaled, 1) / math.log(2.0)})


# mhc_post, of manifold-constrained hyper-connections: mixes residual streams, adds a layer's output to each.

MHC_POST = Op(
    "mhc_post",
    Form(
        "x[n h] residual[n c h] post_layer_mix[n c] comb_res_mix[n c c] -> out[n c h]",
        # out_j = x post_j + sum_i residual_i comb_ij for stream j
        lambda wide: {
            "out": wide["x"][:, None] * wide["post_layer_mix"][..., None]
            + torch.einsum("nih,nij->njh", wide["residual"], wide["comb_res_mix"])
        },
    ),
    family="layout",
    lossless={"x residual post_layer_mix comb_res_mix": full(0)},
    mutants=(
        altered("mixed by the transposed matrix", "comb_res_mix", change=lambda comb: comb.mT),
        altered("layer's output left out", "x", change=lambda x: x * 0),
        altered("residual left out", "residual", change=lambda x: x * 0),
        altered("streams one further", "residual", change=lambda x: x.roll(1, 1)),
        altered("weights of the next stream", "post_layer_mix", change=lambda x: x.roll(1, 1)),
        altered("the layer's output for all streams alike", "post_layer_mix", change=lambda x: x * 0 + 1),
    ),
)
# mhc_pre_big_fuse: computes the weights of these mixtures from a projection, and the layer's input.


def doubly_stochastic(logits: torch.Tensor, eps: float, repeats: int) -> torch.Tensor:
    """Sinkhorn: softmax of rows [n c c] + eps; then columns, rows, .. columns are divided by their sums + eps."""
    matrix = torch.softmax(logits, -1) + eps
    for step in range(2 * repeats - 1):
        matrix = matrix / (matrix.sum(-2 + step % 2, keepdim=True) + eps)
    return matrix


def premixed(
    wide: Wide,
    *,
    square: Part = same,  # changes the squares that are summed
    order: str = "pre post comb",  # of the parts in mix
    mixed_by: Callable[..., torch.Tensor] = doubly_stochastic,  # makes comb_mix
    post: Part = same,  # changes sigmoid(post)
) -> Tensors:
    """`mix = dot_mix / sqrt(sqrsum / k + eps) * scale + base` [n, c + c + c * c], split into pre, post and comb.

    `layer_input` is the sum of the streams, weighted by sigmoid(pre) + eps; `post_mix` is sigmoid(post) * factor;
    `comb_mix` is comb made doubly stochastic. If sqrsum is no input, it is the residual's sum of squares.
    """
    residual = wide["residual"]
    rows, streams, hidden = residual.shape
    total = wide["sqrsum"] if "sqrsum" in wide else square(residual * residual).sum((1, 2))
    root = torch.sqrt(total / wide.number("k", streams * hidden) + wide.number("rms_eps"))
    widths = {"pre": streams, "post": streams, "comb": streams * streams}
    scale = wide["mhc_scale"].repeat_interleave(torch.tensor([*widths.values()], device=residual.device))
    mix = wide["dot_mix"] / root[:, None] * scale + wide["mhc_base"]
    parts = dict(zip(order.split(), torch.split(mix, [widths[one] for one in order.split()], -1), strict=True))
    weights = sigmoid(parts["pre"]) + wide.number("mhc_pre_eps")
    comb = parts["comb"].reshape(rows, streams, streams)
    return {
        "post_mix": (post(sigmoid(parts["post"])) * wide.number("mhc_post_mult_value"))[..., None],
        "comb_mix": mixed_by(comb, wide.number("mhc_sinkhorn_eps"), int(wide.number("sinkhorn_repeat"))),
        "layer_input": (weights[..., None] * residual).sum(1),
    }


MHC = (
    "residual[n c h] mhc_scale[s] mhc_base[m]{} rms_eps? mhc_pre_eps? mhc_sinkhorn_eps? mhc_post_mult_value?"
    " sinkhorn_repeat? block_size? num_splits? -> post_mix[n c o] comb_mix[n c c] layer_input[n h]"
)
MHC_PRE = Op(
    "mhc_pre_big_fuse",
    *(
        Form(
            f"dot_mix[n m] {squares} {MHC.format(count)}",
            premixed,
            constants=("rms_eps", "mhc_pre_eps", "mhc_sinkhorn_eps", "mhc_post_mult_value", "sinkhorn_repeat"),
        )
        for squares, count in (("sqrsum[n]", " k"), ("", ""))
    ),
    family="layout",
    sizes={"o": lambda _: 1},
    where="m == 2 * c + c * c; s == 3",
    scalars={
        "k": 1024,
        "rms_eps": 1e-2,
        "mhc_pre_eps": 0.0625,
        "mhc_sinkhorn_eps": 2e-2,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 3,
        "block_size": 0,
        "num_splits": 1,
    },
    unread={"block_size": "how it is launched", "num_splits": "the shapes say it"},
    draws={"sqrsum": between(512.0, 2048.0)},
    positive=("sqrsum",),
    adversarial={"tiny": {"scale": 2.0**-5}, "offset": {"offset": 2.0}},
    unusual={},  # a NaN reaches many outputs of its token
    adversarial_inputs=("residual", "dot_mix"),
    mutants=(
        altered("rms eps x 10", "rms_eps", change=lambda eps: eps * 10),
        altered("pre eps dropped", "mhc_pre_eps", change=lambda _: 0.0),
        altered("Sinkhorn's eps dropped", "mhc_sinkhorn_eps", change=lambda _: 0.0),
        altered("factor of post dropped", "mhc_post_mult_value", change=lambda _: 1.0),
        altered("a round more", "sinkhorn_repeat", change=lambda repeats: repeats + 1),
        altered("a round less", "sinkhorn_repeat", change=lambda repeats: repeats - 1),
        altered("scales exchanged", "mhc_scale", change=lambda scale: scale.flip(0)),
        altered("base dropped", "mhc_base", change=lambda base: base * 0),
        altered("the next token's squares", "sqrsum", change=lambda total: total.roll(1, 0)),
        altered("k ignored", "k", change=lambda _: 1.0),
        Mutant("squares of the first stream", applies=has_not("sqrsum"), square=lambda x: x[:, :1]),
        Mutant("pre and post exchanged", order="post pre comb"),
        Mutant("comb first", order="comb pre post"),
        Mutant("no softmax", mixed_by=lambda x, eps, repeats: doubly_stochastic(sigmoid(x).log(), eps, repeats)),
        Mutant("rows last", mixed_by=lambda x, eps, repeats: doubly_stochastic(x.mT, eps, repeats).mT),
        Mutant("sigmoid of post dropped", post=lambda share: torch.logit(share)),
    ),
)
BY_EINSUM = "torch:einsum"
MHC_POST.called("mhc:mhc_post", rows="x", sm=SM80)


@MHC_POST.truth("torch", "einsum", BY_EINSUM, rows=None)
def _pytorch_mix(api: Api, definition: Definition, inputs: Given) -> Outputs:
    streams = api[BY_EINSUM]("nih,nij->njh", inputs["residual"].float(), inputs["comb_res_mix"])
    return rounded(
        definition, {"out": streams + inputs["x"].float()[:, None] * inputs["post_layer_mix"][..., None]}
    )
