"""Attention as an op: cases of any call, its inputs, and the mutants that all calls share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from typing import Any

from traceproof.dataset.definition import Definition, DType, TensorSpec
from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.ops import attention as calls
from traceproof.ops import attention_inputs
from traceproof.ops.adapter import dtype_of
from traceproof.ops.attention import Span, Spans, is_causal, is_tabled, listed, one_of, operands_of, page_of
from traceproof.ops.attention_inputs import (
    STRUCTURE,
    CaseLayout,
    PageTable,
    Planned,
    drawn,
    lengths_of,
    resized,
    starts,
    within,
)
from traceproof.ops.base import Unsupported, Value, Values, ordered, scalar, specified, tensor
from traceproof.ops.cases import AFTER, Case, is_hidden
from traceproof.ops.compare import Close, Comparison
from traceproof.ops.far import Far
from traceproof.ops.formats import FP4_BLOCK, swizzled_size
from traceproof.ops.formula import Form, Formula, Mutant, Part, Wide, altered, has
from traceproof.ops.lossless import NEVER, Exactly, full
from traceproof.ops.op import Op

SOFTMAX_COPIES = 4  # logits, masked logits, probabilities and one temporary, as a reference in float32 holds them
# Equivalent variants with tiles of 64 keys reach 2.4 times the error of the baseline, which has one maximum.
IN_FP8 = Close(
    3.0, reason="weights in fp8 are rounded beside the maximum of a tile, the baseline's beside that of all"
)
LONGEST = ("max_kv_len", "max_seq_len", "max_sequence_kv", "max_seq_len_kv")  # inputs: most keys of a sequence
VECTORS = frozenset({*calls.QUERIES, *calls.KEYS, *calls.COMBINED})  # inputs as wide as a query
MOST_QUERIES = ("max_seq_len_q", "max_q_len", "max_token_per_sequence", "q_len_per_req", "seqlen_q", "seq_len")

# Mutants


def grouped(wide: Wide) -> bool:
    """Whether several query heads share each of several key heads."""
    operands = operands_of(wide.definition, wide.values)
    return operands.k.shape[1] not in {1, operands.q.shape[1]}


def seeing(span: Span, change: Part) -> Span:
    """The Span with the keys at places `change(arange(number of keys))` of it."""
    places = change(torch.arange(len(span.rows), device=span.rows.device))
    return replace(span, rows=span.rows[places], bias=None if span.bias is None else span.bias[..., places])


def each(change: Callable[[Span], Span]) -> Callable[[Spans], Spans]:
    """A function that applies `change` to every Span."""
    return lambda spans: tuple(map(change, spans))


def longest(change: Part) -> Callable[[Spans], Spans]:
    """A function that replaces the keys of the longest Span that has queries, as `seeing` does."""

    def changed(spans: Spans) -> Spans:
        lengths = [len(span.rows) if span.stop > span.start else 0 for span in spans]
        index = max(range(len(lengths)), key=lengths.__getitem__, default=-1)
        return tuple(seeing(span, change) if at == index else span for at, span in enumerate(spans))

    return changed


def seen_once(spans: Spans) -> Spans:
    """Spans without the keys that an earlier one has, on pages that sequences share."""
    seen, kept = torch.cat([span.rows[:0] for span in spans]), []
    for span in spans:
        kept.append(seeing(span, partial(torch.masked_select, mask=~torch.isin(span.rows, seen))))
        seen = torch.cat([seen, span.rows])
    return tuple(kept)


def sights(span: Span, rows: torch.Tensor) -> torch.Tensor:
    """How often each query sees each of these ascending rows, [queries, rows] or with heads first, float64.

    A key with a bias counts exp(bias) times.
    """
    seen = calls.visible(span, span.start, span.stop).double()
    if span.bias is not None:
        seen = seen * span.bias.exp()
    times = torch.zeros((*seen.shape[:-1], len(rows)), dtype=seen.dtype, device=rows.device)
    return times.index_add_(-1, torch.searchsorted(rows, span.rows), seen)


def misread(
    name: str,
    *names: str,
    change: Callable[[Any], Value] = lambda value: value,
    order: Callable[[list[int]], list[int]] | None = None,
    spans: Callable[[Spans], Spans] = lambda spans: spans,
) -> Mutant:
    """A mutant whose queries see other keys; it does not apply where they see the same ones.

    It changes the `spans`; or, by `change`, the inputs of these `names`, a table or a length; or kv_indices, of
    which `order` returns the places to take, given the kv_indptr as a list.
    """

    def inputs(wide: Wide) -> Mapping[str, Value]:
        if order is not None and calls.POINTED in wide:
            places = torch.tensor(order(wide["kv_indptr"].tolist()), dtype=torch.int64)
            return {calls.POINTED: wide[calls.POINTED][places]}
        return {one: change(wide.value(one)) for one in names if one in wide}

    def differ(right: Span, wrong: Span) -> bool:
        rows = torch.unique(torch.cat([right.rows, wrong.rows]))
        return not torch.equal(sights(right, rows), sights(wrong, rows))

    def applies(wide: Wide) -> bool:
        right = operands_of(wide.definition, wide.values).spans
        wrong = spans(operands_of(wide.definition, wide.changed(**inputs(wide)).values).spans)
        return any(map(differ, right, wrong))

    return Mutant(name, applies=applies, inputs=inputs, spans=spans)


def transposed_table(bounds: list[int]) -> list[int]:
    """A table [batch, pages] read as [pages, batch]: the entries go to the sequences in turn."""
    entries = [(page, row) for row, (start, stop) in enumerate(pairwise(bounds)) for page in range(stop - start)]
    place = {entry: index for index, entry in enumerate(sorted(entries))}
    return [place[entry] for entry in entries]


def of_lse(name: str, change: Part) -> Mutant:
    """A mutant with a changed log-sum-exp, where the definition has that output."""
    return Mutant(
        name,
        applies=lambda wide: "lse" in wide.definition.outputs,
        outputs=lambda _, found: {"lse": change(found["lse"])},
    )


def biased(change: Part) -> Callable[[Spans], Spans]:
    """A function that applies `change` to the bias of each Span that has one, such as a mask of blocks."""
    return each(lambda span: span if span.bias is None else replace(span, bias=change(span.bias)))


MUTANTS = (
    Mutant("uniform softmax", scale=lambda _: 0.0),
    Mutant(
        "softmax scale dropped",
        applies=lambda wide: operands_of(wide.definition, wide.values).scale != 1,
        scale=lambda _: 1.0,
    ),
    Mutant("softmax scale x 1.02", scale=lambda scale: scale * 1.02),
    misread(
        "one token dropped", spans=longest(lambda at: torch.cat([at[: len(at) // 2], at[len(at) // 2 + 1 :]]))
    ),
    misread("one token twice", spans=longest(lambda at: torch.cat([at[: len(at) // 2 + 1], at[len(at) // 2 :]]))),
    misread("a shared page counts for its first sequence alone", spans=seen_once),
    misread("first token dropped", spans=longest(lambda at: at[1:])),
    misread("last token dropped", spans=longest(lambda at: at[:-1])),
    # Causal queries do not see their own key: the last key is dropped, so that every query sees one fewer.
    misread(
        "causal mask off by one",
        spans=each(lambda span: seeing(span, lambda at: at[:-1]) if span.causal else span),
    ),
    misread("no causal mask", spans=each(lambda span: replace(span, causal=False))),
    misread("causal mask added", spans=each(lambda span: replace(span, causal=True))),
    # The causal mask aligned to the start of the keys instead of their end.
    misread(
        "causal mask from the top left",
        spans=each(lambda span: seeing(span, lambda at: at[: span.stop - span.start]) if span.causal else span),
    ),
    # Rows are read from the cache's start.
    misread(
        "page table ignored",
        spans=each(lambda span: replace(span, rows=torch.arange(len(span.rows), device=span.rows.device))),
    ),
    misread("page table transposed", order=transposed_table),
    misread(
        "pages in the opposite order",
        order=lambda bounds: [at for start, stop in pairwise(bounds) for at in reversed(range(start, stop))],
    ),
    Mutant("wrong head map", applies=grouped, interleaved=True),
    misread("last page ignored", "kv_last_page_len", change=lambda last: last * 0),
    misread("last page read whole", "kv_last_page_len", change=lambda last: last * 0 + (1 << 20)),
    Mutant("values of the next head", applies=grouped, values=lambda values: values.roll(1, 1)),
    Mutant("no maximum subtracted", shifted=False),
    Mutant("soft cap dropped", applies=has("logits_soft_cap"), capped=False),
    Mutant("sinks dropped", applies=has("sinks"), sinks=False),
    misread("window one longer", "window_left", change=lambda size: int(size) + 1),
    misread("window one shorter", "window_left", change=lambda size: max(0, int(size) - 1)),
    misread("window dropped", "window_left", change=lambda size: int(size) + (1 << 20)),
    Mutant("sums in bfloat16", precision="bfloat16"),
    Mutant(
        "weights in fp8",
        applies=lambda wide: one_of(calls.QUERIES, wide.values).dtype.itemsize > 1,
        weights="float8_e4m3fn",
    ),
    of_lse("LSE rounded to bfloat16", lambda lse: lse.to(torch.bfloat16)),
    of_lse("natural-log LSE", lambda lse: lse * math.log(2.0)),
    of_lse("LSE without the maximum", lambda lse: lse - lse.floor()),
    altered("rotary part of the query ignored", "q_pe", change=lambda q: q * 0),
    misread("page table in the opposite order", *calls.TABLES, change=lambda table: table.flip(-1)),
    misread("tables of the sequence before", *calls.TABLES, change=lambda table: table.roll(1, -2)),
    misread("all blocks seen", spans=biased(lambda bias: bias.clamp_min(-1e-9))),
    misread("blocks of the next key head", spans=biased(lambda bias: bias.roll(1, 0))),
    misread(
        "pattern of the queries before",
        spans=biased(lambda bias: bias.roll(int(calls.NUMBERS["q_block_size"]), 1)),
    ),
    misread("summaries weigh one key each", spans=biased(lambda bias: bias.clamp_max(0))),
    misread(
        "validity of keys not looked at",
        "kv_valid_bits",
        change=lambda bits: torch.full_like(bits.view(torch.int32), -1).view(bits.dtype),
    ),
    altered("another rank's keys", "cp_rank", change=lambda rank: rank - 1),
    Mutant(
        "factor of the values dropped",
        applies=lambda wide: one_of(calls.FACTORS, wide.values) is not None,
        factor=False,
    ),
)

# The op


def unfit(definition: Definition) -> str | None:
    """Why inputs, dtypes or numbers of heads of a definition are not supported; None: they are."""
    inputs, with_tables = definition.inputs, is_tabled(definition)
    may_be_codes = {*calls.QUERIES, *calls.KEYS, *calls.VALUES, *calls.COMBINED} if with_tables else set[str]()
    for name, spec in inputs.items():
        known = {"float16", "float32", *([calls.CODES] if name in may_be_codes else [])}
        if not (spec.optional and with_tables) and spec.dtype.startswith("float") and spec.dtype not in known:
            return f"{name} is {spec.dtype}: this oracle knows no scaled storage"
    if "sinks" in inputs and "lse" in definition.outputs:
        return "nobody states whether the log-sum-exp counts the sinks"
    if {"alibi_slopes", "logits_soft_cap"} <= inputs.keys():  # FlashInfer bends the sum of logit and bias
        return "nobody states whether the soft cap bends the bias of ALiBi"
    if with_tables:
        return unfit_with_tables(definition)
    if not calls.has_tokens_first(definition):
        return "the heads of k_cache are before the tokens of a page; known is the opposite"
    return None


# Numbers that an input needs beside it.
BESIDE = {"q_fp4": ("q_global_scale", "k_global_scale"), "causal_seqlens_kv_global": ("cp_world", "cp_rank")}
# Size of the second axis, by the number of axes.
PLANES = {"qkv": {4: 3}, "kv_cache": {4: 1, 5: 2}, "paged_kv_cache": {4: 1, 5: 2}}


def unfit_with_tables(definition: Definition) -> str | None:
    """Why inputs of a call with tables, or of equally long sequences, are not supported; None: they are."""
    inputs, sizes = definition.inputs, definition.const_axes
    if one_of(calls.QUERIES, inputs) is None or not {*calls.KEYS, *calls.COMBINED, "qkv"} & inputs.keys():
        return "there are no queries, or no keys"
    shapes = {name: inputs[name].shape or ("", "") for name in inputs if name in VECTORS}
    widths = {sizes.get(shape[-1]) for shape in shapes.values()}
    if len(widths) > 1:
        return f"queries and keys are {sorted(map(str, widths))} wide: keys are packed"
    counted = bool({*calls.KV_LENGTHS, "max_sequence_kv"} & inputs.keys()) or listed(definition)
    paged = one_of((*calls.COMBINED, "k_cache"), inputs) is not None
    if paged and not (counted and one_of(calls.TABLES, inputs) is not None):
        return "nobody states which pages each sequence has, or how many keys"
    return next(unfit_sizes(definition), None)


def unfit_sizes(definition: Definition) -> Iterator[str]:
    """What is unsupported of the widths, planes, blocks, words and lengths of a call with tables."""
    inputs, sizes = definition.inputs, definition.const_axes
    if calls.value_width(definition) < 1:
        yield "nobody states how wide values are"
    for name in PLANES.keys() & inputs.keys():
        shape = inputs[name].shape or ()
        if (planes := sizes.get(shape[1])) != PLANES[name].get(len(shape), planes):
            yield f"{name} has {planes} planes"
    for name, numbers in BESIDE.items():
        if name in inputs and (lacking := sorted({*numbers} - inputs.keys())):
            yield f"nobody states {', '.join(lacking)}"
    blocks = {"q_block_size", "kv_block_size"}
    if one_of(calls.BLOCKED, inputs) is not None and not blocks <= inputs.keys() | sizes.keys():
        yield "nobody states how many queries and keys a block has"
    yield from (
        f"words of {name} have not 32 bits"
        for name in calls.WORDS & inputs.keys()
        if inputs[name].dtype.bits != 32
    )
    lengths = one_of(calls.KV_LENGTHS, inputs)
    several = lengths is not None and len(lengths.shape) == 2 and not calls.by_heads(definition)
    if several and sizes.get(lengths.shape[1]) != 1:
        yield "a sequence has several lengths"


def equal_keys(definition: Definition) -> Mapping[str, Exactly]:
    """Lossless values: for queries of 0 all keys weigh the same; {} where patterns leave no power of two."""
    patterns = (*calls.BLOCKED, "causal_seqlens_kv_global", "qkv", "seq_len", "custom_mask")
    fp8 = one_of(calls.QUERIES, definition.inputs).dtype == calls.CODES  # it has no ties in bfloat16
    if fp8 or one_of(patterns, definition.inputs) is not None:
        return {}
    return {
        **dict.fromkeys((*calls.QUERIES, "alibi_slopes"), 0.0),
        "sinks": NEVER,
        "window_left": 15.0,  # 15 and the query's own: a power of two of keys
        **dict.fromkeys((*calls.KEYS, *calls.VALUES, *calls.COMBINED, "ckv_cache", "kpe_cache"), full(0)),
    }


def windowed(definition: Definition) -> bool:
    """Whether cases have a window: an optional one in calls with tables often needs a certain mask."""
    window, drafts = definition.inputs.get("window_left"), "q_len_per_req" in definition.inputs
    return window is not None and (not window.optional or drafts or not is_tabled(definition))


class Attention(Op):
    """softmax(q k^T * sm_scale) v over a batch of sequences, and the base-2 log-sum-exp of the logits.

    Without `forms`, they are built from the names of a definition's inputs (`ops.attention.AXES`). With a
    qo_indptr a sequence has several queries and a causal mask aligned to its end (the last query sees all); with a
    kv_indptr alone, one query that sees all. Queries that see no key, q_len > kv_len among them, give 0 and -inf.
    """

    formula: Formula = staticmethod(calls.attention)  # of forms that are built from names
    counted, roomy = "bytnlijfruwzkxAB", "pm"

    def __init__(
        self,
        op_type: str,
        *forms: Form,
        causal: bool = False,  # whether calls with tables or of one sequence have the mask where no input says
        **facts: Any,  # noqa: ANN401 - of an Op
    ) -> None:
        self.causal = causal
        shared: dict[str, Any] = {
            "uneven": "d",
            "where": "h % g == 0; a in (1, g, h); o <= e",
            "requires": unfit,
            "independent_rows": False,
            "gates": calls.GATES,
            "lossless": equal_keys,
            "fast_exponential": True,
            # No NaN in keys and values: kernels may multiply those that a query does not see by zero.
            "unusual": {
                "nan": ("q", "query", "q_nope", "q_pe"),
                **dict.fromkeys(("large", "small"), (*calls.VALUES, "kv_cache", "v_summary")),
            },
            "mutants": MUTANTS,
            "sizes_in_numbers": calls.SILENT | {"q_block_size", "kv_block_size"},
            "unread": dict.fromkeys(calls.SILENT, "it says nothing of the result"),
        }
        super().__init__(op_type, *forms, **shared | facts)

    def of_form(self, definition: Definition) -> Op:
        """For a call with tables or of one sequence: an Attention without forms. Else as of any Op."""
        one_sequence = bool(self.forms) and "k" in self.forms[0].inputs and is_tabled(definition)
        if self.forms and (one_sequence or one_of(calls.TABLES, definition.inputs) is not None):
            return Attention(self.op_type, family=self.family, mutants=self.mutants)
        return super().of_form(definition)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """As declared, but IN_FP8 for fp8 queries, the log-sum-exp excepted."""
        fp8 = one_of(calls.QUERIES, definition.inputs).dtype == calls.CODES
        declared = super().comparisons(definition).items()
        return {name: IN_FP8 if fp8 and name != "lse" else kind for name, kind in declared}

    def unread(self, definition: Definition) -> Mapping[str, str]:
        """As declared, without max_sequence_kv where it is the only input with lengths of keys."""
        read = set() if one_of(calls.KV_LENGTHS, definition.inputs) else {"max_sequence_kv"}
        return {name: why for name, why in super().unread(definition).items() if name not in read}

    def forms_of(self, definition: Definition) -> Sequence[Form]:
        """`forms`; without any, those of the definition's names, one per combination of their possible axes."""
        if self.forms:
            return self.forms
        choices = [
            self._texts(definition, name, spec, silent=name in calls.SILENT)
            for name, spec in definition.inputs.items()
        ]
        choices += [["->"], *(self._texts(definition, name, spec) for name, spec in definition.outputs.items())]
        return [Form(" ".join(texts), self.formula) for texts in product(*choices)]

    @staticmethod
    def _texts(definition: Definition, name: str, spec: TensorSpec, *, silent: bool = False) -> list[str]:
        """A form's text for an input or output, per meaning that its axes may have. Raises Unsupported if none."""
        if spec.shape is None:
            texts = [name] if silent or name in {*calls.NUMBERS, *calls.SCALES} else []
        elif silent:
            axes = " ".join(f"{name}{at}" for at in range(len(spec.shape)))
            texts = [f"{name}[{axes}]" if axes else name]
        else:
            heads_last = calls.HEADS_LAST in definition.inputs and name in {"k_cache", "v_cache"}
            meanings = ("p s g e",) if heads_last else calls.AXES.get(name, ())
            texts = [f"{name}[{axes}]" for axes in meanings if len(axes.split()) == len(spec.shape)]
        if not texts:
            raise Unsupported(f"inputs have unknown {name} of the shape {spec.shape}")
        return texts

    def _problem_of_sizes(self, definition: Definition, form: Form) -> str | None:
        """Why sizes are unknown: heads or widths are var, while other axes follow from lengths; None: known."""
        letters = form.axes(definition)
        stray = {
            letters[letter]
            for letter in "hgdDeoscRa"
            if letter in letters and not (letter == "o" and one_of(calls.COMBINED, definition.inputs))
        } | {"q_block_size", "kv_block_size"}
        stray &= {*definition.var_axes}
        return f"can not tell the sizes of the axes {sorted(stray)}" if stray else None

    # Cases

    def lengths(self, definition: Definition, planned: Planned) -> tuple[list[int], list[int]]:
        """(keys, queries) of each sequence: the planned numbers, changed to ones that the call can have."""
        _, kv_lens, q_lens, _ = planned
        inputs, letters, page = definition.inputs, self.letters(definition), page_of(definition)
        fixed = self.fixed(definition)
        pages_are_full = listed(definition) or (calls.POINTED in inputs and "kv_last_page_len" not in inputs)
        if pages_are_full:
            kv_lens = [-(-length // page) * page for length in kv_lens]
        if one_sequence := "n" in letters and not {"i", "j"} & letters.keys():
            kv_lens = [max(kv_lens)]
        elif "l" in letters or ("max_sequence_kv" in inputs and "b" in letters):  # equally long ones
            kv_lens = [max(kv_lens)] * len(kv_lens)
        kv_lens = self._allowed(definition, kv_lens)
        if not is_tabled(definition):
            assert not isinstance(q_lens, int)
            if "qo_indptr" not in inputs:
                return kv_lens, [1] * len(kv_lens)
            return kv_lens, resized(q_lens, count=len(kv_lens), total=fixed.get("t"))
        if "qkv" in inputs or letters.get("y") == letters.get("l", ""):  # each token is a query
            return kv_lens, kv_lens
        if any(not inputs[name].optional for name in {*calls.ENDS, "actual_seq_lens_q"} & {*inputs}):
            if isinstance(q_lens, int):
                q_lens = [1 + (q_lens + at) % 7 * 2 for at in range(len(kv_lens))]
            q_lens = [*map(min, resized(q_lens, count=len(kv_lens)), kv_lens)]
            q_lens = resized(q_lens, total=fixed.get("t"))
            return [*map(max, q_lens, kv_lens)], q_lens
        # of queries, equally many in each sequence
        count = fixed.get("y", fixed.get("t", 0) // max(1, len(kv_lens)))
        if not count:
            several = one_sequence or self._has_several_queries(definition)
            most = q_lens if isinstance(q_lens, int) else max(q_lens)
            most += 2 * calls.blocks_of(definition)[0] if "a" in letters else 0
            count = max(1, most) if several and {"t", "y"} & letters.keys() else 1
        return [max(length, count) for length in kv_lens], [count] * len(kv_lens)

    def _allowed(self, definition: Definition, kv_lens: list[int]) -> list[int]:
        """Lengths of keys, changed to what const sizes of the batch, tokens, pages, tables and lists allow."""
        fixed, page, tabled = self.fixed(definition), page_of(definition), is_tabled(definition)
        ends = "ijb" if tabled or "qo_indptr" in definition.inputs else "ijbt"
        count = next((fixed[one] - (one in "ij") for one in ends if one in fixed), None)
        of_one = "qkv" in definition.inputs and "t" in fixed
        kv_lens = resized(kv_lens, count=count, total=fixed["t"] if of_one else fixed.get("n"))
        kv_lens = [fixed.get("l", length) for length in kv_lens]
        pages = fixed["p"] * fixed.get("s", page) // page if "p" in fixed else None
        kv_lens = within(kv_lens, page, pages=pages, columns=None if listed(definition) else fixed.get("m"))
        if "x" in fixed and not tabled:
            counts = resized([-(-length // page) for length in kv_lens], total=fixed["x"])
            kv_lens = [max(0, n * page - -length % page) for n, length in zip(counts, kv_lens, strict=True)]
        return kv_lens

    def _has_several_queries(self, definition: Definition) -> bool:
        """Whether equally many queries of each sequence are several: by drafts, a mask, a pattern or a table."""
        letters, names = self.letters(definition), {*definition.inputs, *definition.axes}
        by_drafts = {"q_len_per_req", "seqlen_q", "causal_seqlens_kv_global"} & names
        by_mask = {"mask_type", "causal", "is_causal"} & names if "y" in letters else ()
        return bool(by_drafts or by_mask) or "a" in letters or listed(definition)

    def _case(self, definition: Definition, seed: int, planned: Planned) -> Case:
        """A case of planned lengths: sizes of its var axes by their letters, and drawing instructions."""
        name, _, _, more = planned
        kv_lens, q_lens = self.lengths(definition, planned)
        letters, page, const = self.letters(definition), page_of(definition), definition.const_axes
        fixed = self.fixed(definition)
        pages = PageTable.of(kv_lens, page, shared=bool(more.get("shared")))
        pool = pages.pool
        if is_tabled(definition):  # one page that no sequence has, to pad tables with
            pool = -(-(pages.pool + 1) * page // const.get(letters.get("s", ""), 1))
        batch, longest, (height, width) = len(kv_lens), max(kv_lens, default=0), calls.blocks_of(definition)
        rows, blocks = -(-max(q_lens[:1], default=0) // height), -(-longest // width)
        heads = {letter: const.get(letters.get(letter, ""), 1) for letter in "agh"}
        scales = calls.value_width(definition) * 2 // FP4_BLOCK  # per row of codes
        sizes = {
            "b": batch,
            "y": max(q_lens[:1], default=0),
            "t": sum(q_lens),
            "n": sum(kv_lens),
            "l": longest,
            "p": pool,
            "m": fixed["m"] if listed(definition) and "m" in fixed else max(pages.counts, default=0) + 1,
            "i": batch + 1,
            "j": batch + 1,
            "f": rows + 1,
            "r": rows,
            "u": blocks,
            "w": -(-blocks // 32),
            "z": -(-longest // 32),
            **dict.fromkeys("qx", batch * heads["a"] * rows * blocks if "a" in letters else sum(pages.counts)),
            "o": calls.value_width(definition),
            "k": -(-longest // calls.MSA_BLOCK),
            "A": swizzled_size(sum(q_lens) * heads["h"], scales),
            "B": swizzled_size(sum(kv_lens) * heads["g"], scales),
        }
        params = {"kv_lens": kv_lens, "pattern": "lean", "amplitude": 1.0}
        if is_tabled(definition) or "qo_indptr" in definition.inputs:
            params["q_lens"] = q_lens
        # some definitions give kv_last_page_len (b) the axis of an indptr (i): the size named last counts
        case = self.case(definition, name, sizes, seed, {**params, **more})
        of_no_tensor = dict.fromkeys({*definition.var_axes} - {*letters.values()}, batch)
        return replace(case, axes={**case.axes, **of_no_tensor})

    def planned_of(self, definition: Definition, sizes: Sequence[str], seed: int) -> Iterator[Planned]:
        """Plans of the cases: the specification's sizes, boundary lengths, empty rows, adversarial data."""
        page = page_of(definition)
        if is_tabled(definition):
            return attention_inputs.tabled(definition, seed, sizes, page, self.letters(definition))
        plans = chain.from_iterable(attention_inputs.sized(definition, seed, size, page) for size in sizes)
        return chain(plans, attention_inputs.always(definition, page, causal="qo_indptr" in definition.inputs))

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The cases of `planned_of`."""
        return (self._case(definition, seed, plan) for plan in self.planned_of(definition, sizes, seed))

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """The case with `count` sequences of at most four queries and up to three pages of keys each.

        If `long`: with one sequence of `count` keys and half as many queries. Where keys are chosen by blocks
        (`q2k_indices`), every sixteenth sequence has two blocks more.
        """
        half_page = (page_of(definition) + 1) // 2
        two_blocks = 2 * calls.MSA_BLOCK if "q2k_indices" in definition.inputs else 0
        short = [1 + index % 7 * half_page + two_blocks * (index % 16 == 1) for index in range(count)]
        kv_lens = [count] if long else short
        q_lens = [(length + 1) // 2 if long else min(length, 4) for length in kv_lens]
        plan: Planned = (case.id, kv_lens, q_lens, {})  # no drawing instructions
        return replace(self._case(definition, case.seed, plan), size=case.size)

    def at_once(self, definition: Definition, *, long: bool) -> bool:
        """Whether a reference computes all keys of a long sequence's one query at once: decode without tables."""
        return long and not is_tabled(definition) and "qo_indptr" not in definition.inputs

    def lossless_case(self, definition: Definition, base: Case) -> Case:
        """Sequences of a power of two of keys each, or of pages where all but one are named, and one query."""
        kv_lens = [1 << power for power in (2, 6, 0, 1, 5, 3, 4)]
        if listed(definition) or calls.by_heads(definition):
            page, table = page_of(definition), one_of(calls.TABLES, definition.inputs)
            most = min(definition.const_axes.get(table.shape[-1], 64), max(1, 64 // page))
            kv_lens = [page * (pages + 1) for pages in kv_lens if pages <= most]
        case = self._case(definition, base.seed, (base.id, kv_lens, [1] * len(kv_lens), {}))
        return replace(case, size=base.size)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """The cases of `stressing`; of calls with tables those that have queries of their own, without reuse.

        Where all tokens are queries, long ones would take the square of their memory.
        """
        enlarged, causal = self.enlarged(definition), "qo_indptr" in definition.inputs
        pages, all_query = (
            0 if enlarged is None else enlarged.size(definition, 1),
            attention_inputs.all_query(definition),
        )
        for planned in attention_inputs.stressing(page_of(definition), pages, causal=causal):
            fits = not all_query or max(planned[1]) <= attention_inputs.SELF_LONGEST
            if not is_tabled(definition) or (planned[2] and AFTER not in planned[3] and fits):
                yield self._case(definition, seed, planned)

    def enlarged(self, definition: Definition) -> Far | None:
        """The axis of the cache's pages, if kv_indices numbers them; else None."""
        if calls.POINTED not in definition.inputs:
            return None
        cache = definition.inputs[calls.layout_of(definition.inputs).keys[0]].shape or ()
        return Far(axis=cache[0], slots=(calls.POINTED,), copies=1)

    # Inputs

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Data in the case's style in the call's layout, over permuted pages if there are any."""
        page, letters = page_of(definition), self.letters(definition)
        pages = PageTable.of(lengths_of(case.params)[0], page, shared=bool(case.params.get("shared")))
        ids = pages.table(draw) if "p" in letters else []
        numbers = self._numbers(definition, case)
        data = numbers | self._data(definition, case, draw, self._spans(definition, case, ids, draw.device))
        heads = definition.const_axes.get(letters.get("g", ""), 1)
        values = dict[str, Any]()
        for name, spec in definition.inputs.items():
            shape, value = definition.shape_of(spec, case.axes), data.get(name)
            if shape is None:
                values[name] = value
            elif isinstance(value, torch.Tensor):
                values[name] = value.reshape(shape).to(dtype_of(spec)).contiguous()
            elif name == "sinks":  # lowered, since beside negative logits they would have all the weight
                low = attention_inputs.NEGATIVE if case.params["pattern"] == "negative" else 0.0
                values[name] = draw.normal(name, shape) - low
            elif name == "alibi_slopes":
                values[name] = draw.uniform(name, shape, low=0.02, high=0.5)
            elif name == "custom_mask":  # each key with probability 1/2, and always the first
                values[name] = draw.integers(name, shape, torch.int32, low=0, high=2) > 0
                values[name][:, :1] = True
            elif name in STRUCTURE and not (spec.optional and name in calls.ENDS and is_tabled(definition)):
                lists = STRUCTURE[name](CaseLayout(definition, case, *lengths_of(case.params), ids, heads, shape))
                if len(shape) == 1:  # some definitions shape kv_last_page_len like an indptr, lists have room
                    lists = [*lists, *[0] * (shape[0] - len(lists))]
                numbered = torch.tensor(lists, dtype=torch.int32, device=draw.device).view(shape)
                dtype = dtype_of(spec)  # words of bits may be unsigned
                values[name] = numbered.view(dtype) if dtype.itemsize == 4 else numbered.to(dtype)
            else:
                zeros = torch.zeros(shape, dtype=dtype_of(spec), device=draw.device)
                values[name] = None if spec.optional else zeros
        return ordered(definition, values)

    def _spans(self, definition: Definition, case: Case, ids: list[list[int]], device: torch.device) -> Spans:
        """A Span per sequence, with keys on the pages that `ids` has per sequence, or end to end without any."""
        window = int(calls.NUMBERS["window_left"]) if windowed(definition) else -1
        causal = is_causal(definition, self._numbers(definition, case))
        kv_lens, q_lens = lengths_of(case.params)
        keys, queries, tokens = starts(kv_lens), starts(q_lens), torch.arange(sum(kv_lens))
        if ids:
            page = page_of(definition)
            tokens = calls.tokens_on(torch.tensor([*chain(*ids)], dtype=torch.int64), page)
            keys = [page * start for start in starts([*map(len, ids)])]
        tokens = tokens.to(device)
        spans = []
        for at, length in enumerate(kv_lens):
            rows = tokens[keys[at] : keys[at] + length]
            spans.append(Span(queries[at], queries[at + 1], rows, causal, window))
        return tuple(spans)

    def _data(self, definition: Definition, case: Case, draw: Draw, spans: Spans) -> Values:
        """Queries, keys, values and the softmax scale, by all names that a call may have for them."""
        page = page_of(definition)
        if not is_tabled(definition):
            layout = calls.layout_of(definition.inputs)
            names = dict.fromkeys((*layout.queries, *layout.keys, layout.values))
            return drawn(layout, specified(definition, case, names), case, draw, spans=spans, page=page)
        inputs, letters = definition.inputs, self.letters(definition)
        sizes = {**definition.const_axes, **case.axes}
        size = {letter: sizes[axis] for letter, axis in letters.items() if axis in sizes}
        size.setdefault("o", calls.value_width(definition))
        cache, value, query = (one_of(names, inputs) for names in (calls.COMBINED, calls.VALUES, calls.QUERIES))
        paged, latent = "p" in letters, cache is not None and len(cache.shape) < 5
        count = size["p"] * size["s"] if paged else sum(case.params["kv_lens"])
        heads = size.get("g", size["h"] if "qkv" in inputs else 1)
        shapes = {
            "q": (sum(case.params["q_lens"]), size["h"], size["d"]),
            "k": (count, heads, size["d"]),
            "v": (count, heads, size["o"] if value is None else definition.const_axes[value.shape[-1]]),
        }
        dtype = torch.bfloat16 if query.dtype in {calls.CODES, DType.UINT8} else dtype_of(query)
        specs = (shapes, dict.fromkeys("qkv", dtype))
        data = drawn(calls.KeyLayout(("q",), ("k",), "v"), specs, case, draw, spans=spans, page=page)
        q, k, v = (tensor(data, name) for name in "qkv")
        if latent:  # spare rows' values are a part of their keys
            unread = torch.ones(count, dtype=torch.bool, device=draw.device)
            unread[torch.cat([span.rows for span in spans])] = False
            k[unread, 0, size["o"] // 2] = attention_inputs.POISON
        if not inputs.keys() & calls.SCALES and v.shape[-1] > size["o"]:  # XQA's latent scale is 1
            q = q * scalar(data, "sm_scale")
        named: Values = {**dict.fromkeys(calls.SCALES, data["sm_scale"]), **dict.fromkeys(calls.QUERIES, q)}
        if "c" in letters and "qkv" in inputs:
            named["qkv"] = torch.stack([q, k, v], 1)
        if paged:
            pages = [part.reshape(size["p"], size["s"], *part.shape[1:]) for part in (k, v)]
            if calls.HEADS_LAST not in inputs:
                pages = [part.transpose(1, 2) for part in pages]
            named |= dict.fromkeys(calls.COMBINED, k if latent else torch.stack(pages, 1))
            k, v = pages
        else:  # a summary is a key of its block, since a mean is not the same on all devices
            length, block = size.get("l", 1), calls.blocks_of(definition)[1]
            for name, part in (("k", k), ("v", v)):
                named[f"{name}_summary"] = part.reshape(-1, length, *part.shape[1:])[:, ::block]
        return named | dict.fromkeys(calls.KEYS, k) | dict.fromkeys(calls.VALUES, v)

    @staticmethod
    def _numbers(definition: Definition, case: Case) -> dict[str, float | int | None]:
        """Scalar inputs: sizes by lengths, NUMBERS, or the axis of that name; None where left at the default."""
        kv_lens, q_lens = lengths_of(case.params)
        sizes: dict[str, float | int | None] = {
            **dict.fromkeys(LONGEST, max(kv_lens, default=0)),
            **dict.fromkeys(MOST_QUERIES, max(q_lens, default=0)),
            **dict.fromkeys(("batch_size", "batch_size_scalar"), len(kv_lens)),
            **dict(zip(("q_block_size", "kv_block_size"), calls.blocks_of(definition), strict=True)),
            "semantic_page_size": page_of(definition),
        }
        if not windowed(definition):
            sizes["window_left"] = None
        elif case.params["pattern"] == "equal" and is_hidden(case.id):
            sizes["window_left"] = 0  # each query's own key, and not "no window"
        if "causal" in case.params:
            sizes |= dict.fromkeys(calls.CAUSAL[:2], int(case.params["causal"]))
        values = dict[str, float | int | None]()
        for name, spec in definition.inputs.items():
            if spec.shape is not None:
                continue
            usual: float | int | None = definition.const_axes.get(name, None if spec.optional else 0)
            if name in calls.NUMBERS:
                usual = calls.NUMBERS[name] if spec.dtype.startswith("float") else int(calls.NUMBERS[name])
            values[name] = sizes.get(name, usual)
        return values

    def memory(self, definition: Definition, case: Case) -> int:
        """Bytes of inputs and outputs as stored and in float32, and of the longest sequence with its logits.

        A reference may expand the key heads to the query heads and hold the logits of a whole sequence; the oracle
        holds one sequence, or several short ones, in float64 and a bounded number of logits. The sequences of a
        workload line are taken as equally long.
        """
        specs = [*definition.inputs.values(), *definition.outputs.values()]
        elements = [(math.prod(definition.shape_of(spec, case.axes) or ()), spec.dtype.bits) for spec in specs]
        stored = sum(count * (bits + 32) // 8 for count, bits in elements)
        query = next(definition.inputs[name] for name in calls.QUERIES if name in definition.inputs)
        shape = definition.shape_of(query, case.axes) or (0, 0, 0)
        rows, heads = shape[0], shape[-2]
        if "kv_lens" in case.params:
            kv_lens, q_lens = lengths_of(case.params)
        elif is_tabled(definition):
            kv_lens, q_lens = [1], [1]
        else:
            sizes = {**definition.const_axes, **case.axes}
            batch = max(1, sizes[(definition.inputs["kv_indptr"].shape or ())[0]] - 1)
            units = definition.inputs[calls.POINTED if calls.POINTED in definition.inputs else "k"].shape or ()
            kv_lens = [-(-sizes[units[0]] * page_of(definition) // batch)]
            q_lens = [-(-rows // batch)]
        pairs = [query * length for query, length in zip(q_lens, kv_lens, strict=True)]
        width = sum(definition.const_axes.get((spec.shape or ("",))[-1], 0) for spec in definition.inputs.values())
        sequence = max(kv_lens, default=0) * heads * width * 8
        logits = max(pairs, default=0) * heads * 4 * SOFTMAX_COPIES
        return stored + sequence + logits + SOFTMAX_COPIES * 8 * calls.MAX_LOGITS
