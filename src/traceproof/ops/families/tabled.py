"""Attention as TensorRT-LLM's, cuDNN's, XQA's, PrimTS's and MiniMax's kernels are called: tables, lengths, blocks.

Keys lie in pages that a table [sequences, pages] names, or side by side; queries have lengths, or the same number
in each sequence. Lists or bits of blocks of keys, per block of queries, leave out the others, or put a mean in the
place of each, which weighs as many keys as it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import HostDraw
from traceproof.lazy import torch
from traceproof.ops.adapter import Api, Outputs, dim, dtype_of
from traceproof.ops.attention import GATES, Operands, Span, Spans, attention
from traceproof.ops.attention_inputs import NEGATIVE, POISON, PageTable, Visible, drawn, starts, tiny
from traceproof.ops.base import Given, Tensors, Unsupported, Values, ordered, scalar, tensor
from traceproof.ops.cases import OTHER_SCALARS, Case
from traceproof.ops.formula import Form, Mutant, Wide, altered, has
from traceproof.ops.lossless import NEVER, full
from traceproof.ops.op import Op

if TYPE_CHECKING:
    from traceproof.draw import Draw

# Axes of each input, several where calls differ: b sequences, y queries of each, t queries of all, h heads; n keys
# of all, l of each, g their heads; p pages of s tokens, m pages of a sequence; i, j ends of sequences; a heads of
# a pattern, r its rows, f ends of rows, x entries of lists, u blocks, w and z words of bits. Widths may be packed.
AXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "query"), ("t h d", "b y h d")),
    **dict.fromkeys(("k", "key"), ("n g D", "b l g D")),
    **dict.fromkeys(("v", "value"), ("n g e", "b l g e")),
    **dict.fromkeys(("k_cache", "v_cache"), ("p g s e",)),
    **dict.fromkeys(("kv_cache", "paged_kv_cache"), ("p c g s e", "p c s e", "p s e")),
    **dict.fromkeys(("block_tables", "page_table"), ("b m", "g b m")),
    **dict.fromkeys(("seq_lens", "seq_lens_kv", "actual_seq_lens_kv"), ("b", "g b", "b y")),
    **dict.fromkeys(("actual_seq_lens_q", "causal_seqlens_kv_global"), ("b",)),
    **dict.fromkeys(("qo_indptr", "cum_seq_lens_q", "cu_seqlens_q"), ("i",)),
    **dict.fromkeys(("cum_seq_lens_kv", "cu_seqlens_k"), ("j",)),
    **dict.fromkeys(("k_summary", "v_summary"), ("b u g d",)),
    "sinks": ("h",),
    "q2k_indices": ("g t x",),
    "block_indptr": ("b a f",),
    "block_indices": ("x",),
    "exact_block_bits": ("b a r w",),
    "kv_valid_bits": ("b z",),
    **dict.fromkeys(("output", "output_out"), ("t h o", "b y h o")),
    "lse": ("t h",),
}
QUERIES, KEYS, VALUES = ("q", "query"), ("k", "key", "k_cache"), ("v", "value", "v_cache")
COMBINED, TABLES = ("kv_cache", "paged_kv_cache"), ("block_tables", "page_table")
KV_LENGTHS = ("seq_lens", "seq_lens_kv", "actual_seq_lens_kv")
ENDS, KV_ENDS = ("qo_indptr", "cum_seq_lens_q", "cu_seqlens_q"), ("cum_seq_lens_kv", "cu_seqlens_k")
FACTORS = ("bmm2_scale", "output_scale")
SCALES = ("sm_scale", "scale", "softmax_scale", "bmm1_scale")
BLOCKED = ("block_indptr", "exact_block_bits")
MSA_BLOCK = 128  # keys of a block that MiniMax's lists name
# Of block-sparse cases; windows; the factor of outputs; speculated tokens; context parallelism.
NUMBERS: Mapping[str, float] = {
    "q_block_size": 8,
    "kv_block_size": 16,
    "window_left": 20,
    "bmm2_scale": 0.75,
    "output_scale": 0.75,
    "causal": 1,
    "is_causal": 1,
    "cp_world": 4,
    "cp_rank": 2,
    "enable_block_sparse_attention": 1,
    "return_lse": 1,
}
# What of a call says nothing of the result: memory to work in, sizes once more, what is left at its default.
UNSAID = """
workspace_buffer semaphores output validate split_kv out_dtype kv_layout mask_type enable_pdl max_kv_len
max_seq_len max_seq_len_q max_q_len max_sequence_kv max_token_per_sequence max_seq_len_kv num_kv_heads page_size
seq_len_q batch_size_scalar batch_size request_order share_pattern_across_kv_heads k_sf_cache v_sf_cache o_sf_scale
skip_all_rows_active_check skip_softmax_threshold_scale_factor return_lse enable_block_sparse_attention
semantic_page_size q_len_per_req seqlen_q kv_lora_rank qk_rope_head_dim qk_nope_head_dim return_lse_base
"""
SILENT = frozenset(UNSAID.split())
LENGTHS: Mapping[str, tuple[int, int]] = {"small": (2, 40), "medium": (64, 257), "large": (256, 700)}
PATTERNS = ("negative", "outlier", "ties")


def one_of(names: Iterable[str], inputs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an input, or its specification
    """The first of some inputs that is given; None: none is."""
    return next((inputs[name] for name in names if inputs.get(name) is not None), None)


def words(bits: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits [..., w] as bools [..., 32 * w], the lowest bit first."""
    whole = bits.view(torch.int32).long()[..., None] >> torch.arange(32, device=bits.device)
    return (whole & 1).bool().flatten(-2)


def page_of(definition: Definition) -> int:
    """Tokens that an entry of a table stands for: a page, or the part of one that has that name."""
    spec = one_of((*COMBINED, "k_cache"), definition.inputs)
    shape = () if spec is None else spec.shape
    known = [definition.const_axes.get(axis) for axis in ("page_size", *shape[-2:-1])]
    return next((size for size in known if size), 1)


def number(definition: Definition, inputs: Given, *names: str) -> float | None:
    """A number that is an input or a constant axis, by any of its names; None: neither."""
    found = one_of(names, inputs)
    return float(found) if found is not None else one_of(names, definition.const_axes)


# Reading a call's inputs


def flat(cache: torch.Tensor, *, paged: bool, heads_last: bool) -> torch.Tensor:
    """Keys or values as rows [S, Hkv, D]."""
    return (cache.transpose(1, 2) if paged and not heads_last else cache).reshape(
        -1, *_heads(cache, paged, heads_last)
    )


def _heads(cache: torch.Tensor, paged: bool, heads_last: bool) -> tuple[int, int]:  # noqa: FBT001 - as its caller
    return cache.shape[1 if paged and not heads_last else -2], cache.shape[-1]


def read(definition: Definition, inputs: Given, *, heads_last: bool = False, causal: bool = False) -> Operands:
    """What attention is computed from. Summaries of blocks are keys behind the others."""
    q = one_of(QUERIES, inputs)
    both, table = one_of(COMBINED, inputs), one_of(TABLES, inputs)
    if both is not None and both.dim() < 5:  # latent: a value is the first part of its key
        keys = both
        k = both.reshape(-1, 1, both.shape[-1])
        v = k[..., : definition.const_axes[(next(iter(definition.outputs.values())).shape or ("",))[-1]]]
    else:
        keys, values = (
            (both[:, 0], both[:, 1]) if both is not None else (one_of(KEYS, inputs), one_of(VALUES, inputs))
        )
        last = heads_last and both is None  # of one cache of both, heads lie before tokens
        k, v = (flat(one, paged=table is not None, heads_last=last) for one in (keys, values))
    scale, device = one_of(SCALES, inputs), q.device
    queries, page = q.reshape(-1, *q.shape[-2:]), page_of(definition)
    said = number(definition, inputs, "causal", "is_causal")
    causal = causal if said is None else bool(said)
    window = int(number(definition, inputs, "window_left") or 0) if "window_left" in {*inputs} else -1
    window = -1 if inputs.get("window_left") is None else window
    lengths = one_of(KV_LENGTHS, inputs)
    made = {"q": queries, "k": k, "v": v, "scale": float(scale) if scale is not None else q.shape[-1] ** -0.5}
    if table is not None and table.dim() == 3:  # of each key head: heads and sequences are alike
        heads, group = table.shape[0], queries.shape[1] // table.shape[0]
        spans = []
        for row, head in product(range(table.shape[1]), range(heads)):
            tokens = (table[head, row, :, None].long() * page + torch.arange(page, device=device)).flatten()
            own = tokens[: int(lengths[head, row])] * heads + head
            spans.append(Span(row * heads + head, row * heads + head + 1, own, causal=False))
        made |= {"q": queries.reshape(-1, group, q.shape[-1]), "k": k.reshape(-1, 1, k.shape[-1])}
        return Operands(**{**made, "v": v.reshape(-1, 1, v.shape[-1])}, spans=tuple(spans))
    if lengths is not None and table is not None:
        counts = lengths.view(torch.int32).reshape(len(lengths), -1)[:, 0].tolist()
        rows = [
            (table[row, :, None].long() * page + torch.arange(page, device=device)).flatten()[:count]
            for row, count in enumerate(counts)
        ]
    else:
        ends = one_of(KV_ENDS, inputs)
        bounds = range(0, len(k) + 1, keys.shape[1]) if ends is None else ends.tolist()
        rows = [torch.arange(start, stop, device=device) for start, stop in pairwise(bounds)]
    ends, own = one_of(ENDS, inputs), inputs.get("actual_seq_lens_q")
    asked = starts(own.tolist()) if own is not None else None if ends is None else ends.tolist()
    bounds = asked or [len(queries) // len(rows) * at for at in range(len(rows) + 1)]
    spans = [Span(*pair, own, causal, window) for pair, own in zip(pairwise(bounds), rows, strict=True)]
    if "causal_seqlens_kv_global" in inputs:
        spans = [replace(span, bias=owned(inputs, row, span), causal=False) for row, span in enumerate(spans)]
    if "q2k_indices" in inputs:
        spans = [replace(span, bias=named(inputs["q2k_indices"], span)) for span in spans]
    if one_of(BLOCKED, inputs) is not None:
        spans = [blocked(definition, inputs, row, span, len(k)) for row, span in enumerate(spans)]
        if "k_summary" in inputs:
            summaries = [inputs[name].reshape(-1, *k.shape[1:]) for name in ("k_summary", "v_summary")]
            made |= {"k": torch.cat([k, summaries[0]]), "v": torch.cat([v, summaries[1]])}
    return Operands(**made, spans=tuple(spans))


def hiding(seen: torch.Tensor) -> torch.Tensor:
    """Zeros where a key is seen, else minus infinity."""
    return torch.zeros(seen.shape, dtype=torch.float64, device=seen.device).masked_fill(~seen, -math.inf)


def owned(inputs: Given, row: int, span: Span) -> torch.Tensor:
    """Keys that this rank owns, r, r + world, ..., up to each speculated token's place in the context."""
    world, rank = int(inputs["cp_world"]), int(inputs["cp_rank"])
    place = int(inputs["causal_seqlens_kv_global"][row]) + torch.arange(
        span.stop - span.start, device=span.rows.device
    )
    count = ((place - rank).div(world, rounding_mode="floor") + 1).clamp_min(0)
    return hiding((torch.arange(len(span.rows), device=place.device) < count[:, None])[None])


def named(lists: torch.Tensor, span: Span) -> torch.Tensor:
    """Keys in the blocks that lists [Hkv, T, topk] name, -1 none."""
    block = torch.arange(len(span.rows), device=lists.device) // MSA_BLOCK
    return hiding((lists[:, span.start : span.stop, :, None] == block).any(-2))


def blocked(definition: Definition, inputs: Given, row: int, span: Span, tokens: int) -> Span:
    """A sequence under its pattern of blocks; summaries of the others follow, and weigh as many keys."""
    height, width = (int(number(definition, inputs, name) or 0) for name in ("q_block_size", "kv_block_size"))
    length, device = len(span.rows), span.rows.device
    count = -(-length // width)
    if inputs.get("block_indptr") is not None:
        ends, lists = inputs["block_indptr"][row].tolist(), inputs["block_indices"].long()
        chosen = torch.zeros((len(ends), len(ends[0]) - 1, count), dtype=torch.bool, device=device)
        for head, bounds in enumerate(ends):
            for at, (start, stop) in enumerate(pairwise(bounds)):
                own = lists[start:stop]
                chosen[head, at, own[own < count]] = True
    else:
        chosen = words(inputs["exact_block_bits"][row])[..., :count]
    chosen = chosen.repeat_interleave(height, 1)[:, : span.stop - span.start]
    seen = chosen.repeat_interleave(width, 2)[..., :length]
    if inputs.get("kv_valid_bits") is not None:
        seen = seen & words(inputs["kv_valid_bits"][row])[:length]
    if "k_summary" not in inputs:
        return replace(span, bias=hiding(seen))
    mass = torch.full((count,), float(width), dtype=torch.float64, device=device)
    mass[-1:] = length - (count - 1) * width
    bias = torch.cat([hiding(seen), hiding(~chosen) + mass.log()], -1)
    own = torch.arange(count, device=device) + tokens + row * count
    return replace(span, rows=torch.cat([span.rows, own]), bias=bias)


# Cases and inputs


@dataclass(frozen=True, slots=True)
class CaseLayout:
    """Where keys and queries of a case lie."""

    definition: Definition
    case: Case
    ids: list[list[int]]  # pages of each sequence
    heads: int  # of keys
    shape: tuple[int, ...]  # of the input that is made

    @property
    def kv_lens(self) -> list[int]:
        """Keys of each sequence."""
        return list(self.case.params["kv_lens"])

    @property
    def q_lens(self) -> list[int]:
        """Queries of each sequence."""
        return list(self.case.params["q_lens"])

    @property
    def world(self) -> int:
        """Ranks that share the keys."""
        ranks = int(NUMBERS["cp_world"])
        return ranks // 2 if OTHER_SCALARS in self.case.params else ranks

    def coins(self, name: str, count: int) -> list[int]:
        """About half of the numbers below `count`, with 0."""
        host = HostDraw(definition=self.definition.name, case=f"{self.case.id} blocks", seed=self.case.seed)
        return [at for at, one in enumerate(host.integers(name, count, low=0, high=2)) if one or not at]

    @property
    def kept(self) -> list[tuple[int, list[int]]]:
        """Of each key head and sequence, this one's number, and which of its pages are selected: one is not."""
        found = []
        for head, (row, own) in product(range(self.heads), enumerate(self.ids)):
            lost = (head + 1) % len(own) if len(own) > 1 else -1
            found.append((row, [at for at in range(len(own)) if at != lost]))
        return found


def tables(of: CaseLayout) -> list[list[int]]:
    """Pages of each sequence, then one that nobody has; with a third axis those that each key head selects."""
    used = {page for own in of.ids for page in own}
    spare = min({*range(len(used) + 1)} - used)
    rows = of.ids if len(of.shape) == 2 else [[of.ids[row][at] for at in own] for row, own in of.kept]
    return [[*own, *[spare] * (of.shape[-1] - len(own))] for own in rows]


def key_counts(of: CaseLayout) -> list[int]:
    """Keys of each sequence; of each key head and sequence, where heads select pages."""
    table = one_of(TABLES, of.definition.inputs)
    if table is None or len(table.shape) < 3:
        return of.kv_lens
    page = page_of(of.definition)
    return [sum(min(page, of.kv_lens[row] - at * page) for at in own) for row, own in of.kept]


def block_lists(of: CaseLayout) -> list[list[int]]:
    """Of each sequence, head of the pattern, and block of queries, the blocks of keys that it sees."""
    height, width = (int(of.case.params[name]) for name in ("height", "width"))
    pattern = one_of(BLOCKED, of.definition.inputs)
    heads = of.definition.const_axes[pattern.shape[1]]
    rows = range(-(-of.q_lens[0] // height))
    return [
        of.coins(f"{row} {head} {at}", -(-length // width))
        for (row, length), head, at in product(enumerate(of.kv_lens), range(heads), rows)
    ]


def block_ends(of: CaseLayout) -> list[list[int]]:
    """Where the lists of each sequence and head begin and end."""
    lists = block_lists(of)
    rows, ends = of.shape[2] - 1, starts([len(own) for own in lists])
    return [ends[at : at + rows + 1] for at in range(0, len(lists), rows)]


def block_entries(of: CaseLayout) -> list[int]:
    """The lists, one after the other, with room behind."""
    entries = [block for own in block_lists(of) for block in own]
    return [*entries, *[0] * (of.shape[0] - len(entries))]


def block_bits(of: CaseLayout) -> list[list[int]]:
    """The lists as words of bits."""
    words = [[0] * of.shape[-1] for _ in block_lists(of)]
    for word, own in zip(words, block_lists(of), strict=True):
        for block in own:
            word[block // 32] |= 1 << block % 32
    return [[signed(one) for one in word] for word in words]


def signed(word: int) -> int:
    """32 bits as an int32."""
    return word - (1 << 32) if word >> 31 else word


def valid_bits(of: CaseLayout) -> list[list[int]]:
    """Any keys, but the first of each 32."""
    host = HostDraw(definition=of.definition.name, case=f"{of.case.id} valid", seed=of.case.seed)
    return [
        [one | 1 for one in host.integers(f"{row}", of.shape[1], low=0, high=1 << 31)]
        for row in range(of.shape[0])
    ]


def query_lists(of: CaseLayout) -> list[list[list[int]]]:
    """Of each key head and query, blocks of keys in order, then -1."""
    owner = [row for row, count in enumerate(of.q_lens) for _ in range(count)]
    found = []
    for head in range(of.shape[0]):
        lists = [
            of.coins(f"{head} {at}", -(-of.kv_lens[row] // MSA_BLOCK))[-of.shape[2] :]
            for at, row in enumerate(owner)
        ]
        if "causal" not in of.definition.inputs:  # which hides all but the first block from the first queries
            lists = [own[at % 2 :] or own for at, own in enumerate(lists)]
        found.append([[*own, *[-1] * (of.shape[2] - len(own))] for own in lists])
    return found


STRUCTURE: Mapping[str, Callable[[CaseLayout], Any]] = {
    **dict.fromkeys(TABLES, tables),
    **dict.fromkeys(KV_LENGTHS, key_counts),
    **dict.fromkeys(KV_ENDS, lambda of: starts(of.kv_lens)),
    **dict.fromkeys(ENDS, lambda of: starts(of.q_lens)),
    "actual_seq_lens_q": lambda of: of.q_lens,
    # so that the last of several speculated tokens sees all keys that this rank holds, the first one fewer
    "causal_seqlens_kv_global": lambda of: [(length - 1) * of.world for length in of.kv_lens],
    "block_indptr": block_ends,
    "block_indices": block_entries,
    "exact_block_bits": block_bits,
    "kv_valid_bits": valid_bits,
    "q2k_indices": query_lists,
}


class Tabled(Op):
    """Attention by one of these calls: `causal` where no input says; in pages, heads may lie behind tokens."""

    def __init__(
        self, op_type: str, *, family: str = "attention", causal: bool = False, heads_last: bool = False
    ) -> None:
        super().__init__(op_type, family=family, mutants=(*MUTANTS, *masked(causal=causal)), **SHARED)
        self.sizes_in_numbers = SILENT | {"q_block_size", "kv_block_size"}
        self.inputs_unread = dict.fromkeys(SILENT, "it says nothing of the result")
        self.reading = {"heads_last": heads_last, "causal": causal}

    def formula(
        self,
        wide: Wide,
        *,
        unscaled: bool = False,
        spans: Callable[[Spans], Spans] = tuple,
        **ways: Any,  # noqa: ANN401
    ) -> Tensors:
        """The attention, times the factor of its values where there is one."""

        def reading(inputs: Given) -> Operands:
            return read(wide.definition, inputs, **self.reading)

        found = attention(wide, read=reading, spans=spans, **ways)
        q, factor = one_of(QUERIES, wide.values), one_of(FACTORS, wide.values)
        output = found["output"].reshape(*q.shape[:-1], -1)
        if factor is not None and not unscaled:
            output = output * float(factor)
        made = {"output": output, "output_out": output, "lse": found["lse"]}
        return {name: made[name] for name in wide.definition.outputs}

    def forms_of(self, definition: Definition) -> Sequence[Form]:
        """Forms of the inputs that a definition has, one for each way in which their axes may be meant."""
        choices: list[list[str]] = []
        for part in (definition.inputs, definition.outputs):
            for name, spec in part.items():
                axes = (
                    ("p s g e",)
                    if self.reading["heads_last"] and name in {"k_cache", "v_cache"}
                    else AXES.get(name, ())
                )
                known = [f"{name}[{one}]" for one in axes if len(one.split()) == len(spec.shape or ())]
                own = (
                    [f"{name}[{' '.join(f'{name}{at}' for at in range(len(spec.shape)))}]"]
                    if spec.shape
                    else [name]
                )
                if spec.shape is not None and (name in SILENT and part is definition.inputs):
                    known = own
                if spec.shape is None:
                    known = [name] * (name in SILENT or name in NUMBERS or name in SCALES)
                if not known:
                    raise Unsupported(f"inputs have unknown {name} of the shape {spec.shape}")
                choices.append(known)
            choices.append(["->"])
        return [Form(" ".join(one), self.formula) for one in product(*choices[:-1])]

    def _letters(self, definition: Definition) -> dict[str, str]:
        return self.form(definition).axes(definition)

    def _unsized(self, definition: Definition, form: Form) -> str | None:
        """Sizes follow from lengths; heads and widths must be fixed."""
        letters = form.axes(definition)
        stray = sorted(
            letters[one] for one in "hgdDeoscx" if letters.get(one) in definition.var_axes and one != "x"
        )
        return f"can not tell the sizes of the axes {stray}" if stray else None

    def _case(
        self,
        definition: Definition,
        seed: int,
        name: str,
        lengths: Sequence[int],
        asked: int,
        *,
        whole: bool = False,
        **params: Any,  # noqa: ANN401
    ) -> Case:
        """A case of sequences of so many keys, about `asked` queries each; `whole`: as many as keys."""
        letters, page = self._letters(definition), page_of(definition)
        each_long = "l" in letters
        kv_lens = [max(lengths)] * len(lengths) if each_long else list(lengths)
        even = not any(
            not definition.inputs[name].optional for name in {*ENDS, "actual_seq_lens_q"} & {*definition.inputs}
        )
        fixed = definition.const_axes.get(letters.get("y", ""), 0)
        told = {"mask_type", "causal", "is_causal", "seqlen_q", "q_len_per_req", "causal_seqlens_kv_global"}
        told &= {*definition.inputs, *definition.axes}
        several = "a" in letters or bool(told - {"mask_type", "causal", "is_causal"}) or (told and "y" in letters)
        height, width = (
            definition.const_axes.get(one, int(NUMBERS[one])) for one in ("q_block_size", "kv_block_size")
        )
        asked += 2 * height if "a" in letters else 0
        q_lens = [fixed or (max(1, asked) if several else 1)] * len(kv_lens)
        kv_lens = [max(one, q_lens[0]) for one in kv_lens] if even else kv_lens
        if not even:
            counts = [
                length if whole else 1 + (asked + at) % 7 * 2 * bool(asked) for at, length in enumerate(kv_lens)
            ]
            q_lens = [min(pair) for pair in zip(counts, kv_lens, strict=True)]
        pages = PageTable.of(kv_lens, page, shared=False)
        stored = definition.const_axes.get(letters.get("s", ""), 1)
        longest = max(kv_lens)
        rows, blocks = -(-q_lens[0] // height), -(-longest // width)
        heads = definition.const_axes.get(letters.get("a", ""), 1)
        sizes = {
            "b": len(kv_lens),
            "y": q_lens[0],
            "t": sum(q_lens),
            "n": sum(kv_lens),
            "l": longest,
            "p": -(-(pages.pool + 1) * page // stored),
            "m": max(pages.counts) + 1,
            "i": len(kv_lens) + 1,
            "j": len(kv_lens) + 1,
            "f": rows + 1,
            "r": rows,
            "u": blocks,
            "w": -(-blocks // 32),
            "z": -(-longest // 32),
            "x": len(kv_lens) * heads * rows * blocks,
        }
        said = {
            "kv_lens": kv_lens,
            "q_lens": q_lens,
            "pattern": "lean",
            "amplitude": 1.0,
            "height": height,
            "width": width,
            **params,
        }
        return self.case(definition, name, sizes, seed, said)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """Lengths at random and at both sides of a page's end, a single key, patterns of data."""
        page = page_of(definition)
        for size in sizes:
            low, high = LENGTHS[size]
            for at, count in enumerate({"small": (1, 3), "medium": (4, 5), "large": (16, 32)}[size]):
                host = HostDraw(definition=definition.name, case=f"{size}-{at}", seed=seed)
                lengths = host.integers("kv_lens", count, low=low, high=high)
                lengths[-1] = page * -(-low // page) + (at if size != "small" else -at)
                yield self._case(definition, seed, f"{size}-{at}", lengths, 1 + at * 10)
        yield self._case(definition, seed, "edge-single", [1], 1)
        yield self._case(definition, seed, "adversarial-long", [640, 300], 3, amplitude=3.0)
        if "w" in self._letters(definition):  # words of bits for many blocks
            yield self._case(definition, seed, "adversarial-words", [int(NUMBERS["kv_block_size"]) * 133], 3)
        for pattern in PATTERNS:
            yield self._case(definition, seed, f"adversarial-{pattern}", [page + 2, 37], 9, pattern=pattern)
        small = tiny(definition)
        yield self._case(definition, seed, "adversarial-tiny", [page + 2, 37], 9, pattern="tiny", amplitude=small)

    def stress(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """Extreme logits, and equal keys."""
        for pattern in ("below", "above", "equal"):
            yield self._case(definition, seed, f"stress-{pattern}", [19, 37], 3, pattern=pattern)

    def boundaries(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """None: heads lean to such keys in all cases."""
        del definition, seed
        return ()

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """So many sequences, of lists some with several blocks; or one of so many keys and queries."""
        far = 2 * MSA_BLOCK * ("q2k_indices" in definition.inputs)
        lengths = [count] if long else [1 + 5 * (at % 7) + far * (at % 16 == 1) for at in range(count)]
        return replace(self._case(definition, case.seed, case.id, lengths, 3, whole=long), size=case.size)

    def lossless_case(self, definition: Definition, base: Case) -> Case:
        """Sequences of powers of two of keys."""
        found = self._case(definition, base.seed, base.id, [32, 64, 16, 8], 0)
        return replace(found, size=base.size)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Data of attention (`attention_inputs`) in the call's layout, over permuted pages; patterns of blocks."""
        letters, page = self._letters(definition), page_of(definition)
        known = {**definition.const_axes, **case.axes}
        sizes = {one: known[axis] for one, axis in letters.items() if axis in known}
        kv_lens, paged = list(case.params["kv_lens"]), "p" in letters
        ids = PageTable.of(kv_lens, page, shared=False).table(draw) if paged else []
        count = sizes["p"] * sizes["s"] if paged else sum(kv_lens)
        within, rows = torch.arange(page, device=draw.device), torch.arange(sum(kv_lens), device=draw.device)
        if paged:
            parts = [torch.tensor(own, device=draw.device)[:, None] * page + within for own in ids]
            rows = torch.cat([part.flatten()[:length] for part, length in zip(parts, kv_lens, strict=True)])
        q, k, v, scale = self._data(definition, case, draw, (rows, count, page), sizes)
        made: Values = dict.fromkeys(SCALES, scale)
        made |= dict.fromkeys(QUERIES, q)
        if paged:
            both = one_of(COMBINED, definition.inputs)
            last = self.reading["heads_last"] and both is None
            pages = [one.reshape(sizes["p"], sizes["s"], *one.shape[1:]) for one in (k, v)]
            pages = pages if last else [one.transpose(1, 2) for one in pages]
            latent = both is not None and len(both.shape) < 5
            made |= dict.fromkeys(COMBINED, k if latent else torch.stack(pages, 1))
            k, v = pages
        else:  # of each block a key that it has: a mean is not the same on all devices
            width = int(case.params["width"])
            each_long = sizes.get("l", 1)
            made |= {
                f"{name}_summary": part.reshape(-1, each_long, *part.shape[1:])[:, ::width]
                for name, part in (("k", k), ("v", v))
            }
        made |= dict.fromkeys(KEYS, k) | dict.fromkeys(VALUES, v)
        values: Values = {}
        for name, spec in definition.inputs.items():
            shape = definition.shape_of(spec, case.axes)
            found = made.get(name)
            if shape is None:
                values[name] = found if name in SCALES else self._number(definition, name, case)
            elif isinstance(found, torch.Tensor):
                values[name] = found.reshape(shape).contiguous()
            elif name == "sinks":  # beside negative logits they would have all the weight
                low = NEGATIVE if case.params["pattern"] == "negative" else 0.0
                values[name] = draw.normal(name, shape) - low
            elif name in STRUCTURE and not (spec.optional and name in ENDS):
                lists = STRUCTURE[name](CaseLayout(definition, case, ids, sizes.get("g", 1), shape))
                whole = torch.tensor(lists, dtype=torch.int32, device=draw.device).view(shape)
                values[name] = whole.view(dtype_of(spec))
            else:
                values[name] = (
                    None if spec.optional else torch.zeros(shape, dtype=dtype_of(spec), device=draw.device)
                )
        return ordered(definition, values)

    def _data(
        self,
        definition: Definition,
        case: Case,
        draw: Draw,
        keys: tuple[torch.Tensor, int, int],
        sizes: Mapping[str, int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Queries [t h d], keys [rows g d], values [rows g o] and the softmax scale; which rows are read."""
        rows, count, page = keys
        kv_lens, q_lens = list(case.params["kv_lens"]), list(case.params["q_lens"])
        first, visible, lengths = [], [], []
        says = {"causal", "is_causal"} & {*definition.inputs}
        causal = bool(number(definition, NUMBERS if says else {}, "causal", "is_causal") or self.reading["causal"])
        for start, kv_len, q_len in zip(starts(kv_lens), kv_lens, q_lens, strict=False):
            first += [start] * q_len
            lengths += [kv_len] * q_len
            visible += [max(0, kv_len - q_len + at + 1) if causal else kv_len for at in range(q_len)]
        dtype = one_of(QUERIES, definition.inputs).dtype
        letters = {"q": "thd", "k": "ngd", "v": "nge"}
        specs = {name: TensorSpec(shape=tuple(axes), dtype=dtype) for name, axes in letters.items()}
        plain = definition.model_copy(update={"inputs": specs})
        own = {"t": sum(q_lens), "n": count, "g": 1, **sizes, "e": sizes["o"]}
        window = definition.inputs.get("window_left")
        seen = Visible(
            rows,
            first,
            visible,
            lengths,
            page,
            -1 if window is None or window.optional else int(NUMBERS["window_left"]),
        )
        data = drawn(plain, replace(case, axes=own | {"n": count}), draw, seen)
        q, k, v = (tensor(data, name) for name in "qkv")
        both = one_of(COMBINED, definition.inputs)
        if both is not None and len(both.shape) < 5:  # spare rows' values are a part of their keys
            unread = torch.ones(count, dtype=torch.bool, device=draw.device)
            unread[rows] = False
            k[unread, 0, sizes["o"] // 2] = POISON
        return q, k, v, scalar(data, "sm_scale")

    def _number(self, definition: Definition, name: str, case: Case) -> float | int | None:
        """A scalar: a size that lengths tell, one of NUMBERS; None where it is left at its default."""
        kv_lens, q_lens, height, width = (case.params[key] for key in ("kv_lens", "q_lens", "height", "width"))
        spec = definition.inputs[name]
        asked, longest = max(q_lens), max(kv_lens)
        known: Mapping[str, float] = {
            **dict.fromkeys(("max_kv_len", "max_seq_len", "max_sequence_kv", "max_seq_len_kv"), longest),
            **dict.fromkeys(
                ("max_seq_len_q", "max_q_len", "max_token_per_sequence", "q_len_per_req", "seqlen_q"), asked
            ),
            **dict.fromkeys(("batch_size", "batch_size_scalar"), len(kv_lens)),
            "q_block_size": height,
            "kv_block_size": width,
            "semantic_page_size": page_of(definition),
        }
        if name in known:
            return known[name]
        if name == "window_left" and spec.optional:  # wants a mask that is not the default
            return None
        if name in NUMBERS:
            return NUMBERS[name] if spec.dtype.startswith("float") else int(NUMBERS[name])
        axis = definition.const_axes.get(name)
        return axis if axis is not None else None if spec.optional else 0

    def memory(self, definition: Definition, case: Case) -> int:
        """All tensors as the default has it, and of the longest sequence the logits of all heads, four times."""
        longest, asked = (int(max(case.params.get(name, [1]))) for name in ("kv_lens", "q_lens"))
        heads = dim(definition, next(name for name in QUERIES if name in definition.inputs), -2) or 1
        return super().memory(definition, case) + 32 * longest * asked * heads


def known(definition: Definition) -> str | None:
    """What of a call's numbers is not known; None: all is."""
    inputs = definition.inputs
    for name, spec in inputs.items():
        if not spec.optional and spec.dtype.startswith("float") and spec.dtype not in {"float16", "float32"}:
            return f"{name} is {spec.dtype}: this oracle knows no scaled storage"
    spec = one_of(QUERIES, inputs)
    if spec is None or (one_of(KEYS, inputs) is None and one_of(COMBINED, inputs) is None):
        return "there are no queries, or no keys"
    widths = {
        definition.const_axes.get((one.shape or ("",))[-1])
        for name, one in inputs.items()
        if name in (*QUERIES, *KEYS, *COMBINED)
    }
    if len(widths) > 1:
        return f"queries and keys are {sorted(map(str, widths))} wide: keys are packed"
    paged, lengths = one_of(TABLES, inputs) is not None, one_of(KV_LENGTHS, inputs) is not None
    if one_of((*COMBINED, "k_cache"), inputs) is not None and not (paged and lengths):
        return "nobody states which pages each sequence has, or how many keys"
    if not paged and one_of(KV_ENDS, inputs) is None and len(one_of(KEYS, inputs).shape or ()) == 3:
        return "nobody states which keys a query sees"
    planes = [
        definition.const_axes.get((inputs[name].shape or ("", ""))[1])
        for name in COMBINED
        if name in inputs and len(inputs[name].shape or ()) > 3
    ]
    return f"the cache has {planes[0]} planes" if planes and planes[0] not in {1, 2} else None


# Ways of computing it, right and wrong


def paged(wide: Wide) -> bool:
    """Whether there is a table with several pages a sequence."""
    table = one_of(TABLES, wide.values)
    return table is not None and table.shape[-1] > 2


def shared_heads(wide: Wide) -> bool:
    """Whether several key heads are each shared by several queries' heads."""
    q, cache, table = (one_of(names, wide.values) for names in (QUERIES, (*COMBINED, *KEYS), TABLES))
    if one_of(COMBINED, wide.values) is cache and cache.dim() < 5:
        return False
    heads = {q.shape[-2], 1}
    return not heads & {*cache.shape[1:-1]} - {1} and (table is None or table.dim() == 2) and q.shape[-2] > 2


def swap(
    name: str,
    names: Sequence[str],
    change: Callable[[Any], Any],
    *,
    applies: Callable[[Wide], bool] = lambda _: True,
) -> Mutant:
    """A mutant that reads an input otherwise."""
    made = altered(name, *names, change=change)
    before = made.applies
    made.applies = lambda wide: before(wide) and applies(wide)
    return made


def biased(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Spans], Spans]:
    """Sequences with another mask of blocks."""
    return lambda spans: tuple(one if one.bias is None else replace(one, bias=change(one.bias)) for one in spans)


def patterned(wide: Wide) -> bool:
    """Whether blocks or places leave out keys."""
    masks = (*BLOCKED, "q2k_indices", "causal_seqlens_kv_global")
    return one_of(masks, wide.values) is not None and "k_summary" not in wide


def headed(wide: Wide) -> bool:
    """Whether key heads have patterns of their own."""
    pattern = one_of((*BLOCKED, "q2k_indices"), wide.values)
    return pattern is not None and pattern.shape[0 if "q2k_indices" in wide else 1] > 1


def tall(wide: Wide) -> bool:
    """Whether a sequence has several blocks of queries."""
    if "block_indptr" in wide:
        return wide.given("block_indptr").shape[2] > 2
    return "exact_block_bits" in wide and wide.given("exact_block_bits").shape[2] > 1


def masked(*, causal: bool) -> tuple[Mutant, ...]:
    """Mutants of the causal mask, which is there by default or not."""

    def applies(wide: Wide) -> bool:
        said = number(wide.definition, wide.values, "causal", "is_causal")
        q, b = one_of(QUERIES, wide.values), one_of((*TABLES, *KV_ENDS), wide.values)
        several = b is not None and q.shape[:-2].numel() > len(b) and one_of(TABLES, wide.values) is not None
        return (causal if said is None else bool(said)) and (several or one_of(KV_ENDS, wide.values) is not None)

    def without(spans: Spans) -> Spans:
        return tuple(replace(one, causal=False) for one in spans)

    def late(spans: Spans) -> Spans:
        """The last key hidden from all, as if the diagonal were one before."""
        hide = (
            replace(one, rows=one.rows[:-1], bias=None if one.bias is None else one.bias[..., :-1])
            for one in spans
        )
        return tuple(hide)

    return (
        Mutant("causal mask dropped", applies=applies, spans=without),
        Mutant("diagonal one before", applies=applies, spans=late),
    )


MUTANTS = (
    Mutant("uniform softmax", scale=lambda _: 0.0),
    Mutant("softmax scale x 1.02", scale=lambda scale: scale * 1.02),
    Mutant("no maximum subtracted", shifted=False),
    Mutant("sums in bfloat16", precision="bfloat16"),
    Mutant("weights in fp8", weights="float8_e4m3fn"),
    Mutant("values of the next head", applies=shared_heads, values=lambda values: values.roll(1, 1)),
    Mutant("wrong head map", applies=shared_heads, interleaved=True),
    swap("page table in the opposite order", TABLES, lambda table: table.flip(-1), applies=paged),
    swap(
        "tables of the sequence before",
        TABLES,
        lambda table: table.roll(1, -2),
        applies=lambda wide: one_of(TABLES, wide.values).shape[-2] > 1,
    ),
    swap(
        "one key fewer",
        KV_LENGTHS,
        lambda lengths: (lengths.view(torch.int32) - 1).clamp_min(1).view(lengths.dtype),
        applies=lambda wide: (
            one_of(TABLES, wide.values) is not None
            and bool((one_of(KV_LENGTHS, wide.values).view(torch.int32) > 1).any())
        ),
    ),
    Mutant("all blocks seen", applies=patterned, spans=biased(lambda bias: bias.clamp_min(-1e-9))),
    Mutant("blocks of the next key head", applies=headed, spans=biased(lambda bias: bias.roll(1, 0))),
    Mutant(
        "pattern of the queries before",
        applies=tall,
        spans=biased(lambda bias: bias.roll(int(NUMBERS["q_block_size"]), 1)),
    ),
    Mutant("summaries weigh one key each", applies=has("k_summary"), spans=biased(lambda bias: bias.clamp_max(0))),
    swap(
        "validity of keys not looked at",
        ("kv_valid_bits",),
        lambda bits: torch.full_like(bits.view(torch.int32), -1).view(bits.dtype),
    ),
    swap("another rank's keys", ("cp_rank",), lambda rank: rank - 1),
    Mutant(
        "factor of the values dropped",
        applies=lambda wide: one_of(FACTORS, wide.values) is not None,
        unscaled=True,
    ),
    swap("sinks dropped", ("sinks",), lambda sinks: sinks - 1e4),
)
SHARED: Any = {
    "uneven": "d",
    "requires": known,
    "apart": False,
    "coupled": True,
    "gates": GATES,
    "unusual": {"nan": QUERIES, **dict.fromkeys(("large", "small"), (*VALUES, "kv_cache", "v_summary"))},
    # of patterns and owners it is no power of two of keys that a query sees
    "lossless": lambda definition: (
        {}
        if one_of((*BLOCKED, "causal_seqlens_kv_global"), definition.inputs)
        else {
            **dict.fromkeys(QUERIES, 0.0),
            **dict.fromkeys((*KEYS, *VALUES, *COMBINED), full(0)),
            "sinks": NEVER,
            "window_left": 15.0,
        }
    ),
}


TRTLLM_PAGED = Tabled("trtllm_paged", causal=True)
CUDNN_PAGED = Tabled("cudnn_paged")
XQA = Tabled("xqa", heads_last=True)
BLOCK_SPARSE = Tabled("block_sparse")
MSA_SPARSE = Tabled("msa_sparse")
DCP = Tabled("trtllm_paged_dcp_spec")

# FlashInfer's functions, given what a definition has by its own names, and what they want beside it.

WORKSPACE = 128 << 20  # bytes
More = Callable[[Given], dict[str, Any]]
SM100 = ((10, 0), (12, 9))


def called(op: Op, name: str, serves: str, **conditions: Any) -> Callable[[More], More]:  # noqa: ANN401
    """Decorate what a function wants beside a definition's inputs: it is called by keyword.

    Outputs are in the order in which it gives them.
    """
    key = f"flashinfer.{name.replace('.', ':')}"

    def added(more: More) -> More:
        @op.truth("flashinfer", name, key, serves=serves, rows=None, **conditions)
        def _call(api: Api, definition: Definition, inputs: Given) -> Outputs:
            given = {**{one: value for one, value in inputs.items() if value is not None}, **more(inputs)}
            given = {one: value for one, value in given.items() if value is not None}
            found = api[key](**given)
            parts = found if isinstance(found, tuple) else (given.get("output") if found is None else found,)
            return dict(zip(definition.outputs, parts, strict=False))

        return more

    return added


def scratch(inputs: Given) -> dict[str, Any]:
    """Memory to work in."""
    q = one_of(QUERIES, inputs)
    return {"workspace_buffer": torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)}


def longest(inputs: Given, *names: str) -> int:
    """The largest number of the first of these inputs."""
    return int(one_of(names, inputs).max())


@called(
    XQA,
    "xqa.xqa",
    "q k_cache v_cache page_table seq_lens -> output",
    sm=((9, 0), (12, 9)),
)
def for_xqa(inputs: Given) -> dict[str, Any]:
    """Semaphores, and sizes of the cache."""
    return {
        **scratch(inputs),
        "seq_lens": inputs["seq_lens"].to(torch.uint32),
        "output": torch.empty_like(inputs["q"]),
        "semaphores": torch.zeros(8 << 20, dtype=torch.uint32, device=inputs["q"].device),
        "num_kv_heads": inputs["k_cache"].shape[2],
        "page_size": inputs["k_cache"].shape[1],
    }


@called(
    TRTLLM_PAGED,
    "prefill.trtllm_batch_context_with_kv_cache",
    "query kv_cache block_tables seq_lens bmm1_scale bmm2_scale cum_seq_lens_q [window_left] [sinks] -> output",
    sm=SM100,
)
def for_context(inputs: Given) -> dict[str, Any]:
    """The longest sequences, and where those of keys begin."""
    return {
        **scratch(inputs),
        "max_q_len": int(inputs["cum_seq_lens_q"].diff().max()),
        "max_kv_len": longest(inputs, "seq_lens"),
        "batch_size": len(inputs["seq_lens"]),
        "cum_seq_lens_kv": torch.nn.functional.pad(inputs["seq_lens"].cumsum(0), (1, 0)).int(),
        "sinks": None if inputs.get("sinks") is None else [inputs["sinks"]],
    }


@called(
    DCP,
    "decode.trtllm_batch_decode_with_kv_cache",
    "query k_cache v_cache block_tables seq_lens bmm1_scale bmm2_scale causal_seqlens_kv_global cp_world cp_rank"
    " -> output lse",
    sm=SM100,
)
def for_speculation(inputs: Given) -> dict[str, Any]:
    """Both caches as one argument, and the longest sequence."""
    return {
        **scratch(inputs),
        "kv_cache": (inputs["k_cache"], inputs["v_cache"]),
        **dict.fromkeys(("k_cache", "v_cache")),
        "max_seq_len": longest(inputs, "seq_lens"),
        "q_len_per_req": len(inputs["query"]) // len(inputs["seq_lens"]),
        "return_lse": True,
    }


@called(
    CUDNN_PAGED,
    "cudnn.cudnn_batch_prefill_with_kv_cache",
    "q k_cache v_cache scale actual_seq_lens_q actual_seq_lens_kv block_tables [causal] -> output lse",
    accepts=lambda definition: dim(definition, "q", 2) == 128,  # the only width without cuDNN's own graphs
    sm=((8, 0), (12, 9)),
)
def for_cudnn(inputs: Given) -> dict[str, Any]:
    """Lengths with four axes, the longest ones, and where queries begin."""
    return {
        **scratch(inputs),
        "max_token_per_sequence": longest(inputs, "actual_seq_lens_q"),
        "max_sequence_kv": longest(inputs, "actual_seq_lens_kv"),
        **{f"actual_seq_lens_{one}": inputs[f"actual_seq_lens_{one}"].view(-1, 1, 1, 1) for one in ("q", "kv")},
        "batch_offsets_q": torch.nn.functional.pad(inputs["actual_seq_lens_q"].cumsum(0), (1, 0)).int(),
        "batch_offsets_units": "tokens",
        "causal": bool(inputs.get("causal")),
        "return_lse": True,
    }


def pattern(definition: Definition, inputs: Given) -> dict[str, Any]:
    """The pattern's own arguments."""
    found: dict[str, Any] = {name: definition.const_axes.get(name) for name in ("q_block_size", "kv_block_size")}
    words = ("exact_block_bits", "kv_valid_bits")
    found |= {name: inputs[name].view(torch.uint32) for name in words if inputs.get(name) is not None}
    heads = one_of(BLOCKED, inputs).shape[1]
    return {**found, "share_pattern_across_kv_heads": heads == 1 and one_of(QUERIES, inputs).shape[2] > 1}


BLOCKS, PAGED_BLOCKS = (
    f"flashinfer.attention.prims_ts.block_sparse:block_sparse_attention{rest}"
    for rest in ("", "_with_paged_kv_cache")
)
GEOMETRY = "[q_block_size] [kv_block_size] [kv_valid_bits] [mask_type] [sm_scale] -> output"


@BLOCK_SPARSE.truth(
    "flashinfer",
    "block_sparse_attention_with_paged_kv_cache",
    PAGED_BLOCKS,
    serves=f"q k_cache v_cache block_tables seq_lens_kv block_indptr block_indices {GEOMETRY}",
    rows=None,
    sm=SM100,
)
def _flashinfer_pages(api: Api, definition: Definition, inputs: Given) -> Outputs:
    names = ("q", "block_tables", "seq_lens_kv", "block_indptr", "block_indices", "sm_scale")
    cache, most = (inputs["k_cache"], inputs["v_cache"]), longest(inputs, "seq_lens_kv")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    return {
        "output": api[PAGED_BLOCKS](
            **given, paged_kv_cache=cache, max_seq_len_kv=most, **pattern(definition, inputs)
        )
    }


@BLOCK_SPARSE.truth(
    "flashinfer",
    "block_sparse_attention",
    BLOCKS,
    serves=f"q k v [block_indptr] [block_indices] [exact_block_bits] [k_summary] [v_summary] {GEOMETRY}",
    rows=None,
    sm=SM100,
)
def _flashinfer_blocks(api: Api, definition: Definition, inputs: Given) -> Outputs:
    names = ("q", "k", "v", "k_summary", "v_summary", "sm_scale")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    lists = {name: inputs.get(name) for name in ("block_indptr", "block_indices")}
    form = {
        "sparse_format": "bsr" if "block_indptr" in inputs else "bitmask",
        "use_proxy_routes": "k_summary" in inputs,
    }
    return {"output": api[BLOCKS](**given, **lists, **form, **pattern(definition, inputs))}


@called(
    MSA_SPARSE,
    "msa_ops.msa_sparse_attention",
    "q k v q2k_indices cu_seqlens_q cu_seqlens_k [causal] [softmax_scale] -> output",
    sm=SM100,
)
def for_lists(inputs: Given) -> dict[str, Any]:
    """Whether there is a causal mask."""
    return {"causal": bool(inputs.get("causal"))}
