"""Attention as an op: cases of any call, its inputs, and the mutants that all calls share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, product
from typing import Any

from traceproof.dataset.definition import Definition, DType
from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.ops import attention as calls
from traceproof.ops.adapter import dim, dtype_of
from traceproof.ops.attention import (
    GATES,
    MAX_LOGITS,
    Span,
    Spans,
    attention,
    is_causal,
    is_tabled,
    listed,
    one_of,
    operands_of,
    page_of,
)
from traceproof.ops.attention_inputs import (
    NEGATIVE,
    POISON,
    STRUCTURE,
    CaseLayout,
    PageTable,
    Planned,
    Visible,
    always,
    drawn,
    lengths_of,
    sized,
    stressing,
    tabled,
)
from traceproof.ops.base import Unsupported, Value, Values, ordered, scalar, specified, tensor
from traceproof.ops.cases import Case
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
MOST_ASKED = ("max_seq_len_q", "max_q_len", "max_token_per_sequence", "q_len_per_req", "seqlen_q", "seq_len")

# Mutants


def grouped(wide: Wide) -> bool:
    """Whether several query heads share each of several key heads."""
    given = operands_of(wide.definition, wide.values)
    return given.k.shape[1] not in {1, given.q.shape[1]}


def seeing(span: Span, change: Part) -> Span:
    """The Span with the keys at places `change(arange(number of keys))` of it."""
    at = change(torch.arange(len(span.rows), device=span.rows.device))
    return replace(span, rows=span.rows[at], bias=None if span.bias is None else span.bias[..., at])


def each(change: Callable[[Span], Span]) -> Callable[[Spans], Spans]:
    """A function that applies `change` to every Span."""
    return lambda spans: tuple(map(change, spans))


def longest(change: Part) -> Callable[[Spans], Spans]:
    """A function that replaces the keys of the longest Span that has queries, as `seeing` does."""

    def changed(spans: Spans) -> Spans:
        lengths = [len(span.rows) if span.stop > span.start else 0 for span in spans]
        at = max(range(len(lengths)), key=lengths.__getitem__, default=-1)
        return tuple(seeing(span, change) if index == at else span for index, span in enumerate(spans))

    return changed


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

    def seen(span: Span) -> torch.Tensor:
        return span.rows if span.bias is None else span.rows[span.bias.isfinite().any(0).any(0)]

    def differ(one: Span, other: Span) -> bool:
        """Whether the queries of two Spans see different keys."""
        if one.window != other.window and one.stop > one.start:
            last = len(one.rows) - 1
            return min(max(one.window, 0), last) != min(max(other.window, 0), last)
        several = one.stop - one.start > 1
        if one.stop <= one.start or (one.causal and several) != (other.causal and several):
            return one.stop > one.start
        biases = [span.bias for span in (one, other) if span.bias is not None]
        if len({bias.shape for bias in biases}) == 1 and not torch.equal(biases[0], biases[-1]):
            return True
        rows = (seen(one), seen(other))
        if not (one.causal and several):
            rows = (rows[0].sort().values, rows[1].sort().values)
        return not torch.equal(*rows)

    def applies(wide: Wide) -> bool:
        before, after = (
            operands_of(wide.definition, given.values).spans for given in (wide, wide.changed(**inputs(wide)))
        )
        return any(map(differ, before, spans(after)))

    return Mutant(name, applies=applies, inputs=inputs, spans=spans)


def transposed_table(bounds: list[int]) -> list[int]:
    """A table [batch, pages] read as [pages, batch]: the entries go to the sequences in turn."""
    turns = [(page, row) for row, (start, stop) in enumerate(pairwise(bounds)) for page in range(stop - start)]
    place = {turn: index for index, turn in enumerate(sorted(turns))}
    return [place[turn] for turn in turns]


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
    misread("first token dropped", spans=longest(lambda at: at[1:])),
    misread("last token dropped", spans=longest(lambda at: at[:-1])),
    # Causal queries do not see their own key: the last key is dropped, so that every query sees one fewer.
    misread(
        "causal mask off by one",
        spans=each(lambda span: seeing(span, lambda at: at[:-1]) if span.causal else span),
    ),
    misread("no causal mask", spans=each(lambda span: replace(span, causal=False))),
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


def unfit(definition: Definition) -> str | None:  # noqa: PLR0911 - a reason each
    """Why inputs, dtypes or numbers of heads of a definition are not supported; None: they are."""
    inputs, given = definition.inputs, is_tabled(definition)
    coded = {*calls.QUERIES, *calls.KEYS, *calls.VALUES, *calls.COMBINED} if given else set[str]()
    for name, spec in inputs.items():
        read = {"float16", "float32", *([calls.CODES] if name in coded else [])}
        if not (spec.optional and given) and spec.dtype.startswith("float") and spec.dtype not in read:
            return f"{name} is {spec.dtype}: this oracle knows no scaled storage"
    if not given:
        if "sinks" in inputs and "lse" in definition.outputs:
            return "nobody states whether the log-sum-exp counts the sinks"
        layout = calls.layout_of(inputs)
        heads = dim(definition, layout.queries[0], -2) or 0
        kv_heads = 1 if layout.latent else dim(definition, layout.keys[0], -2)
        divided = kv_heads and heads % kv_heads == 0
        return None if divided else f"{heads} query heads are no multiple of {kv_heads} key heads"
    if one_of(calls.QUERIES, inputs) is None or not {*calls.KEYS, *calls.COMBINED, "qkv"} & inputs.keys():
        return "there are no queries, or no keys"
    kinds = {
        name: one.shape or ("", "")
        for name, one in inputs.items()
        if name in {*calls.QUERIES, *calls.KEYS, *calls.COMBINED}
    }
    widths = {definition.const_axes.get(shape[-1]) for shape in kinds.values()}
    if len(widths) > 1:
        return f"queries and keys are {sorted(map(str, widths))} wide: keys are packed"
    counted = bool({*calls.KV_LENGTHS, "max_sequence_kv"} & inputs.keys()) or listed(definition)
    if one_of((*calls.COMBINED, "k_cache"), inputs) is not None and not (
        one_of(calls.TABLES, inputs) is not None and counted
    ):
        return "nobody states which pages each sequence has, or how many keys"
    planes = [definition.const_axes.get(kinds[name][1]) for name in calls.COMBINED if len(kinds.get(name, ())) > 3]
    return f"the cache has {planes[0]} planes" if planes and planes[0] not in {1, 2} else None


def equal_keys(definition: Definition) -> Mapping[str, Exactly]:
    """Lossless values: for queries of 0 all keys weigh the same; {} where patterns leave no power of two."""
    patterned = (
        one_of((*calls.BLOCKED, "causal_seqlens_kv_global", "qkv", "seq_len"), definition.inputs) is not None
    )
    patterned = patterned or "custom_mask" in definition.inputs
    if patterned or one_of(calls.QUERIES, definition.inputs).dtype == calls.CODES:  # fp8 has no ties in bfloat16
        return {}
    values = (*calls.KEYS, *calls.VALUES, *calls.COMBINED, "ckv_cache", "kpe_cache")
    found = dict.fromkeys((*calls.QUERIES, "alibi_slopes"), 0.0) | {
        "sinks": NEVER,
        "window_left": 15.0,
    }  # 15 and the query's own: a power of two of keys
    return found | dict.fromkeys(values, full(0))


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

    formula: Formula = staticmethod(attention)  # of forms that are built from names

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
            "requires": unfit,
            "independent_rows": False,
            "gates": GATES,
            "lossless": equal_keys,
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
        whole = bool(self.forms) and "k" in self.forms[0].inputs and is_tabled(definition)
        if self.forms and ({*calls.TABLES} & {*definition.inputs} or whole):
            return Attention(self.op_type, family=self.family, mutants=self.mutants)
        return super().of_form(definition)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """As declared, but IN_FP8 for fp8 queries, the log-sum-exp excepted."""
        narrow = one_of(calls.QUERIES, definition.inputs).dtype == calls.CODES
        found = super().comparisons(definition).items()
        return {name: IN_FP8 if narrow and name != "lse" else kind for name, kind in found}

    def unread(self, definition: Definition) -> Mapping[str, str]:
        """As declared, without max_sequence_kv where it is the only input with lengths of keys."""
        read = set() if one_of(calls.KV_LENGTHS, definition.inputs) else {"max_sequence_kv"}
        return {name: why for name, why in super().unread(definition).items() if name not in read}

    def forms_of(self, definition: Definition) -> Sequence[Form]:
        """`forms`; without any, those of the definition's names, one per combination of their possible axes."""
        if self.forms:
            return self.forms
        choices: list[list[str]] = []
        for part in (definition.inputs, definition.outputs):
            for name, spec in part.items():
                last = calls.HEADS_LAST in definition.inputs and name in {"k_cache", "v_cache"}
                axes = ("p s g e",) if last else calls.AXES.get(name, ())
                known = [f"{name}[{one}]" for one in axes if len(one.split()) == len(spec.shape or ())]
                if spec.shape is None:
                    known = [name] * (name in {*calls.SILENT, *calls.NUMBERS, *calls.SCALES})
                elif name in calls.SILENT and part is definition.inputs:
                    own = " ".join(f"{name}{at}" for at in range(len(spec.shape)))
                    known = [f"{name}[{own}]" if own else name]
                if not known:
                    raise Unsupported(f"inputs have unknown {name} of the shape {spec.shape}")
                choices.append(known)
            choices.append(["->"])
        return [Form(" ".join(one), self.formula) for one in product(*choices[:-1])]

    def _letters(self, definition: Definition) -> dict[str, str]:
        return self.form(definition).axes(definition)

    def _unsized(self, definition: Definition, form: Form) -> str | None:
        """Why sizes are unknown: heads or widths are var, while other axes follow from lengths; None: known."""
        letters = form.axes(definition)
        stray = sorted(
            letters[one]
            for one in "hgdDeoscR"
            if letters.get(one) in definition.var_axes
            and not (one == "o" and one_of(calls.COMBINED, definition.inputs))
        )
        return f"can not tell the sizes of the axes {stray}" if stray else None

    # Cases

    def fitted(self, definition: Definition, planned: Planned) -> tuple[list[int], list[int]]:
        """(keys, queries) of each sequence as a call can have them: full pages, equal lengths, or one sequence."""
        _, kv_lens, asked, _ = planned
        inputs, letters, page = definition.inputs, self._letters(definition), page_of(definition)
        if listed(definition) or (calls.POINTED in inputs and "kv_last_page_len" not in inputs):  # pages are full
            kv_lens = [-(-length // page) * page for length in kv_lens]
        if not is_tabled(definition):
            assert not isinstance(asked, int)
            return kv_lens, asked if "qo_indptr" in inputs else [1] * len(kv_lens)
        alone = "n" in letters and not {"i", "j"} & letters.keys()  # of one sequence
        if alone or "l" in letters or ("max_sequence_kv" in inputs and "b" in letters):
            kv_lens = [max(kv_lens)] * (1 if alone else len(kv_lens))
        if "qkv" in inputs or letters.get("y") == letters.get("l", ""):
            return kv_lens, kv_lens
        if any(not inputs[name].optional for name in {*calls.ENDS, "actual_seq_lens_q"} & {*inputs}):
            if isinstance(asked, int):
                asked = [1 + (asked + at) % 7 * 2 * bool(asked) for at in range(len(kv_lens))]
            return kv_lens, [min(pair) for pair in zip(asked, kv_lens, strict=True)]
        # equally many queries in each sequence
        told = {"mask_type", *calls.CAUSAL, "seqlen_q", "causal_seqlens_kv_global"} & {*inputs, *definition.axes}
        several = alone or "a" in letters or listed(definition) or (told and "y" in letters)
        several = (several or told - {"mask_type", *calls.CAUSAL[:2]}) and {"t", "y"} & letters.keys()
        most = (asked if isinstance(asked, int) else max(asked)) + 2 * calls.blocks_of(definition)[0] * (
            "a" in letters
        )
        count = definition.const_axes.get(letters.get("y", ""), 0) or (max(1, most) if several else 1)
        return [max(length, count) for length in kv_lens], [count] * len(kv_lens)

    def _case(self, definition: Definition, seed: int, planned: Planned) -> Case:
        """A case of planned lengths: sizes of its var axes by their letters, and drawing instructions."""
        name, _, _, more = planned
        kv_lens, q_lens = self.fitted(definition, planned)
        letters, page, const = self._letters(definition), page_of(definition), definition.const_axes
        pages = PageTable.of(kv_lens, page, shared=bool(more.get("shared")))
        batch, longest, (height, width) = len(kv_lens), max(kv_lens, default=0), calls.blocks_of(definition)
        rows, blocks = -(-q_lens[0] // height), -(-longest // width)
        heads = {one: const.get(letters.get(one, ""), 1) for one in "agh"}
        pool = pages.pool
        if is_tabled(definition):  # one page that no sequence has, to pad tables with
            pool = -(-(pages.pool + 1) * page // const.get(letters.get("s", ""), 1))
        scales = calls.value_width(definition) * 2 // FP4_BLOCK  # per row of codes
        sizes = {
            "b": batch,
            "y": q_lens[0],
            "t": sum(q_lens),
            "n": sum(kv_lens),
            "l": longest,
            "p": pool,
            "m": max(pages.counts) + 1,
            "i": batch + 1,
            "j": batch + 1,
            "f": rows + 1,
            "r": rows,
            "u": blocks,
            "w": -(-blocks // 32),
            "z": -(-longest // 32),
            "x": batch * heads["a"] * rows * blocks if "a" in letters else sum(pages.counts),
            "o": calls.value_width(definition),
            "k": -(-longest // calls.MSA_BLOCK),
            "A": swizzled_size(sum(q_lens) * heads["h"], scales),
            "B": swizzled_size(sum(kv_lens) * heads["g"], scales),
        }
        known = dict.fromkeys(letters.values(), 1)
        # in this order: some definitions give kv_last_page_len the axis of an indptr
        known |= {letters[one]: size for one, size in sizes.items() if one in letters}
        axes = {axis: known.get(axis, batch) for axis in definition.var_axes}
        asked = {"q_lens": q_lens} if is_tabled(definition) or "qo_indptr" in definition.inputs else {}
        params = {"kv_lens": kv_lens, "pattern": "lean", "amplitude": 1.0, **asked, **more}
        return Case(name, name.partition("-")[0], axes, seed, params)

    def planned_of(self, definition: Definition, sizes: Sequence[str], seed: int) -> Iterator[Planned]:
        """Plans of the cases: the specification's sizes, boundary lengths, empty rows, adversarial data."""
        page = page_of(definition)
        if is_tabled(definition):
            return tabled(definition, seed, sizes, page, self._letters(definition))
        drawn = chain.from_iterable(sized(definition, seed, size, page) for size in sizes)
        return chain(drawn, always(definition, page, causal="qo_indptr" in definition.inputs))

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The cases of `planned_of`."""
        return (self._case(definition, seed, one) for one in self.planned_of(definition, sizes, seed))

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """`count` short sequences of at most four queries; or one of `count` keys and half as many queries."""
        step = (page_of(definition) + 1) // 2  # so that some of many sequences have several pages
        far = 2 * calls.MSA_BLOCK * ("q2k_indices" in definition.inputs)  # or several blocks
        lens = [count] if long else [1 + at % 7 * step + far * (at % 16 == 1) for at in range(count)]
        asked = [(length + 1) // 2 if long else min(length, 4) for length in lens]
        return replace(self._case(definition, case.seed, (case.id, lens, asked, {})), size=case.size)

    def at_once(self, definition: Definition, *, long: bool) -> bool:
        """Whether a reference computes all keys of a long sequence's one query at once: decode without tables."""
        return long and not is_tabled(definition) and "qo_indptr" not in definition.inputs

    def lossless_case(self, definition: Definition, base: Case) -> Case:
        """Sequences of a power of two of keys each, or of pages where all but one are named, and one query."""
        lens = [1 << power for power in (2, 6, 0, 1, 5, 3, 4)]
        if listed(definition) or calls.by_heads(definition):
            named, page = (one_of(calls.TABLES, definition.inputs).shape or ("",))[-1], page_of(definition)
            most = min(definition.const_axes.get(named, 64), max(1, 64 // page))
            lens = [page * (pages + 1) for pages in lens if pages <= most]
        return replace(self._case(definition, base.seed, (base.id, lens, [1] * len(lens), {})), size=base.size)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """The cases of `stressing`; of calls with tables only those with a pattern of data."""
        enlarged, causal = self.enlarged(definition), "qo_indptr" in definition.inputs
        pages = 0 if enlarged is None else enlarged.size(definition, 1)
        for planned in stressing(page_of(definition), pages, causal=causal):
            if not is_tabled(definition) or "pattern" in planned[3]:
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
        page, letters = page_of(definition), self._letters(definition)
        pages = PageTable.of(lengths_of(case.params)[0], page, shared=bool(case.params.get("shared")))
        ids = pages.table(draw) if "p" in letters else []
        numbers, values = self._numbers(definition, case), dict[str, Any]()
        causal = is_causal(definition, numbers)
        seen = Visible.of(case.params, ids, page, causal=causal, device=draw.device)
        window = int(calls.NUMBERS["window_left"]) if windowed(definition) else -1
        made = self._data(definition, case, draw, replace(seen, window=window))
        heads = definition.const_axes.get(letters.get("g", ""), 1)
        for name, spec in definition.inputs.items():
            shape, found = definition.shape_of(spec, case.axes), made.get(name)
            if shape is None:
                values[name] = numbers.get(name) if found is None else found
            elif isinstance(found, torch.Tensor):
                values[name] = found.reshape(shape).to(dtype_of(spec)).contiguous()
            elif name == "sinks":  # lowered, since beside negative logits they would have all the weight
                low = NEGATIVE if case.params["pattern"] == "negative" else 0.0
                values[name] = draw.normal(name, shape) - low
            elif name == "alibi_slopes":
                values[name] = draw.uniform(name, shape, low=0.02, high=0.5)
            elif name == "custom_mask":  # each key with probability 1/2, and always the first
                values[name] = draw.integers(name, shape, torch.int32, low=0, high=2) > 0
                values[name][:, :1] = True
            elif name in STRUCTURE and not (spec.optional and name in calls.ENDS and is_tabled(definition)):
                lists = STRUCTURE[name](CaseLayout(definition, case, ids, heads, shape))
                if len(shape) == 1:  # some definitions shape kv_last_page_len like an indptr, lists have room
                    lists = [*lists, *[0] * (shape[0] - len(lists))]
                whole = torch.tensor(lists, dtype=torch.int32, device=draw.device).view(shape)
                values[name] = whole.view(dtype_of(spec))
            elif spec.optional:
                values[name] = None
            else:
                values[name] = torch.zeros(shape, dtype=dtype_of(spec), device=draw.device)
        return ordered(definition, values)

    def _data(self, definition: Definition, case: Case, draw: Draw, seen: Visible) -> Values:
        """Queries, keys, values and the softmax scale, by all names that a call may have for them."""
        if not is_tabled(definition):
            layout = calls.layout_of(definition.inputs)
            names = dict.fromkeys((*layout.queries, *layout.keys, layout.values))
            return drawn(layout, specified(definition, case, names), case, draw, seen)
        letters, known = self._letters(definition), {**definition.const_axes, **case.axes}
        size = {one: known[axis] for one, axis in letters.items() if axis in known}
        size.setdefault("o", calls.value_width(definition))
        both, values = one_of(calls.COMBINED, definition.inputs), one_of(calls.VALUES, definition.inputs)
        paged, latent = "p" in letters, both is not None and len(both.shape) < 5
        count = size["p"] * size["s"] if paged else sum(case.params["kv_lens"])
        heads = size.get("g", size["h"] if "qkv" in definition.inputs else 1)
        width = size["o"] if values is None else definition.const_axes[values.shape[-1]]
        shapes = {
            "q": (sum(case.params["q_lens"]), size["h"], size["d"]),
            "k": (count, heads, size["d"]),
            "v": (count, heads, width),
        }
        spec = one_of(calls.QUERIES, definition.inputs)
        dtype = torch.bfloat16 if spec.dtype in {calls.CODES, DType.UINT8} else dtype_of(spec)
        data = drawn(calls.KeyLayout(("q",), ("k",), "v"), (shapes, dict.fromkeys("qkv", dtype)), case, draw, seen)
        q, k, v = (tensor(data, name) for name in "qkv")
        if latent:  # spare rows' values are a part of their keys
            unread = torch.ones(count, dtype=torch.bool, device=draw.device)
            unread[seen.rows] = False
            k[unread, 0, size["o"] // 2] = POISON
        if not definition.inputs.keys() & calls.SCALES and v.shape[-1] > size["o"]:  # XQA's latent scale is 1
            q = q * scalar(data, "sm_scale")
        made: Values = {**dict.fromkeys(calls.SCALES, data["sm_scale"]), **dict.fromkeys(calls.QUERIES, q)}
        if "c" in letters and "qkv" in definition.inputs:
            made["qkv"] = torch.stack([q, k, v], 1)
        if paged:
            pages = [one.reshape(size["p"], size["s"], *one.shape[1:]) for one in (k, v)]
            if calls.HEADS_LAST not in definition.inputs:
                pages = [one.transpose(1, 2) for one in pages]
            made |= dict.fromkeys(calls.COMBINED, k if latent else torch.stack(pages, 1))
            k, v = pages
        else:  # a summary is a key of its block, since a mean is not the same on all devices
            each, step = size.get("l", 1), calls.blocks_of(definition)[1]
            for name, part in (("k", k), ("v", v)):
                made[f"{name}_summary"] = part.reshape(-1, each, *part.shape[1:])[:, ::step]
        return made | dict.fromkeys(calls.KEYS, k) | dict.fromkeys(calls.VALUES, v)

    @staticmethod
    def _numbers(definition: Definition, case: Case) -> dict[str, float | int | None]:
        """Scalar inputs: sizes by lengths, NUMBERS, or the axis of that name; None where left at the default."""
        (kv_lens, q_lens), found = lengths_of(case.params), dict[str, float | int | None]()
        known: dict[str, float | int | None] = {
            **dict.fromkeys(LONGEST, max(kv_lens, default=0)),
            **dict.fromkeys(MOST_ASKED, max(q_lens, default=0)),
            **dict.fromkeys(("batch_size", "batch_size_scalar"), len(kv_lens)),
            **dict(zip(("q_block_size", "kv_block_size"), calls.blocks_of(definition), strict=True)),
            "semantic_page_size": page_of(definition),
        }
        if not windowed(definition):
            known["window_left"] = None
        elif case.params["pattern"] == "equal":
            known["window_left"] = 0  # each query's own key, and not "no window"
        if "causal" in case.params:
            known |= dict.fromkeys(calls.CAUSAL[:2], int(case.params["causal"]))
        for name, spec in definition.inputs.items():
            if spec.shape is not None:
                continue
            usual: float | int | None = definition.const_axes.get(name, None if spec.optional else 0)
            if name in calls.NUMBERS:
                usual = calls.NUMBERS[name] if spec.dtype.startswith("float") else int(calls.NUMBERS[name])
            found[name] = known.get(name, usual)
        return found

    def memory(self, definition: Definition, case: Case) -> int:
        """Bytes of inputs and outputs as stored and in float32, and of the longest sequence with its logits.

        A reference may expand the key heads to the query heads and hold the logits of a whole sequence; the oracle
        holds one sequence in float64 and a bounded number of logits. The sequences of a workload line are taken as
        equally long.
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
        return stored + sequence + logits + SOFTMAX_COPIES * 8 * MAX_LOGITS
