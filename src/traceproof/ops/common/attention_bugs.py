"""Answers of the attention ops, through the operands that all of them are brought to."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.answers import Answer, Answers, Subject, Tensors, Values
from traceproof.ops.common.attention import HALVES, Operands, Precision, Span, attention

Alter = Callable[[Operands], Operands | None]
TILE = 64  # keys that an online softmax takes at a time
PRODUCTS = 8  # of the smallest instructions of tensor cores for 16-bit numbers: they cut off most often


def operands_of(subject: Subject, inputs: Values | None = None) -> Operands:
    """The case's operands, of other inputs if given."""
    operands: Callable[[Definition, Values], Operands] = subject.op.operands  # type: ignore[attr-defined] # attention has them
    return operands(subject.definition, subject.inputs if inputs is None else inputs)


def naive(subject: Subject, operands: Operands) -> Tensors:
    """Float32 sums, softmax weights rounded to the inputs' dtype."""
    return subject.rounded(attention(operands, Precision(torch.float32, operands.q.dtype)))


def _altered(alter: Alter) -> Callable[[Subject], Tensors | None]:
    def make(subject: Subject) -> Tensors | None:
        changed = alter(operands_of(subject))
        return None if changed is None else naive(subject, changed)

    return make


def _spans(operands: Operands, change: Callable[[Span], torch.Tensor]) -> Operands:
    return replace(operands, spans=tuple(replace(span, rows=change(span)) for span in operands.spans))


def _longest(operands: Operands) -> int:
    lengths = [len(span.rows) if span.stop > span.start else 0 for span in operands.spans]
    return max(range(len(lengths)), key=lengths.__getitem__, default=-1)


def _in_longest(change: Callable[[torch.Tensor], torch.Tensor]) -> Alter:
    def alter(operands: Operands) -> Operands | None:
        chosen = _longest(operands)
        if chosen < 0 or len(operands.spans[chosen].rows) < 2:
            return None
        spans = list(operands.spans)
        spans[chosen] = replace(spans[chosen], rows=change(spans[chosen].rows))
        return replace(operands, spans=tuple(spans))

    return alter


def _drop_middle(rows: torch.Tensor) -> torch.Tensor:
    middle = len(rows) // 2
    return torch.cat([rows[:middle], rows[middle + 1 :]])


def _double_middle(rows: torch.Tensor) -> torch.Tensor:
    middle = len(rows) // 2
    return torch.cat([rows[: middle + 1], rows[middle:]])


def _strict_mask(operands: Operands) -> Operands | None:
    """A causal query does not see its own key: the last key goes, and every query sees one less."""
    if not any(span.causal and len(span.rows) > 1 for span in operands.spans):
        return None
    return _spans(operands, lambda span: span.rows[:-1] if span.causal else span.rows)


def _no_mask(operands: Operands) -> Operands | None:
    if not any(span.causal and span.stop - span.start > 1 for span in operands.spans):
        return None
    return replace(operands, spans=tuple(replace(span, causal=False) for span in operands.spans))


def _top_left_mask(operands: Operands) -> Operands | None:
    """The causal mask aligned to the start of the keys instead of their end."""
    if not any(span.causal and len(span.rows) > span.stop - span.start for span in operands.spans):
        return None
    return _spans(operands, lambda span: span.rows[: span.stop - span.start] if span.causal else span.rows)


def _contiguous_rows(operands: Operands) -> Operands:
    """The page table is ignored: rows are read from the cache's start."""
    return _spans(operands, lambda span: torch.arange(len(span.rows), device=span.rows.device))


def _wrong_heads(operands: Operands) -> Operands | None:
    """Query head h reads key head h % Hkv instead of h // ratio."""
    heads, kv_heads = operands.q.shape[1], operands.k.shape[1]
    if kv_heads in {1, heads}:
        return None
    index = torch.arange(heads) % kv_heads
    return replace(operands, k=operands.k[:, index], v=operands.v[:, index])


def _without_last_page(subject: Subject) -> Tensors | None:
    last = subject.inputs.get("kv_last_page_len")
    if not isinstance(last, torch.Tensor):
        return None
    operands = operands_of(subject)
    if not any(len(span.rows) > int(count) for span, count in zip(operands.spans, last, strict=False)):
        return None
    spans = []
    for span, count in zip(operands.spans, last.tolist(), strict=False):
        keep = len(span.rows) - count
        spans.append(replace(span, rows=span.rows[:keep]) if keep > 0 else span)
    return naive(subject, replace(operands, spans=tuple(spans)))


def _full_last_page(subject: Subject) -> Tensors | None:
    last = subject.inputs.get("kv_last_page_len")
    page = subject.definition.const_axes.get("page_size")
    if not isinstance(last, torch.Tensor) or page is None or not len(last):
        return None
    return naive(subject, operands_of(subject, subject.with_inputs(kv_last_page_len=torch.full_like(last, page))))


def _pages(order: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Subject], Tensors | None]:
    """The page table's entries in another order; `order` takes an indptr and gives places of entries."""

    def make(subject: Subject) -> Tensors | None:
        pages = subject.inputs.get("kv_indices")
        if not isinstance(pages, torch.Tensor) or not len(pages):
            return None
        changed = pages[order(subject.tensor("kv_indptr").long())]
        altered = operands_of(subject, subject.with_inputs(kv_indices=changed))
        return None if _same_keys(operands_of(subject), altered) else naive(subject, altered)

    return make


def _same_keys(one: Operands, other: Operands) -> bool:
    """Whether every query sees the same keys in some order: that is a right answer."""
    return all(
        not (a.causal and a.stop - a.start > 1) and torch.equal(a.rows.sort().values, b.rows.sort().values)
        for a, b in zip(one.spans, other.spans, strict=True)
    )


def _transposed_table(indptr: torch.Tensor) -> torch.Tensor:
    """A table [batch, pages] read as [pages, batch]: entries go to the sequences in turn."""
    counts = (indptr[1:] - indptr[:-1]).tolist()
    turns = [(page, row) for row, count in enumerate(counts) for page in range(count)]
    place = {turn: index for index, turn in enumerate(sorted(turns))}
    return torch.tensor([place[turn] for turn in turns])


def _reversed_table(indptr: torch.Tensor) -> torch.Tensor:
    """Each sequence's pages from the last to the first."""
    bounds = indptr.tolist()
    return torch.cat([torch.arange(stop - 1, start - 1, -1) for start, stop in itertools.pairwise(bounds)])


def _lse(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Subject], Tensors | None]:
    def make(subject: Subject) -> Tensors | None:
        if "lse" not in subject.definition.outputs:
            return None
        outputs = naive(subject, operands_of(subject))
        return outputs | {"lse": change(outputs["lse"])}

    return make


def _without_rope_part(subject: Subject) -> Tensors | None:
    if "q_pe" not in subject.inputs:
        return None
    return naive(subject, operands_of(subject, subject.with_inputs(q_pe=torch.zeros_like(subject.tensor("q_pe")))))


WRONG = (
    Answer("uniform softmax", _altered(lambda operands: replace(operands, scale=0.0))),
    Answer("softmax scale dropped", _altered(lambda operands: replace(operands, scale=1.0))),
    Answer("softmax scale x 1.02", _altered(lambda operands: replace(operands, scale=operands.scale * 1.02))),
    Answer("one token dropped", _altered(_in_longest(_drop_middle))),
    Answer("one token twice", _altered(_in_longest(_double_middle))),
    Answer("first token dropped", _altered(_in_longest(lambda rows: rows[1:]))),
    Answer("last token dropped", _altered(_in_longest(lambda rows: rows[:-1]))),
    Answer("causal mask off by one", _altered(_strict_mask)),
    Answer("no causal mask", _altered(_no_mask)),
    Answer("causal mask from the top left", _altered(_top_left_mask)),
    Answer("page table ignored", _altered(_contiguous_rows)),
    Answer("page table transposed", _pages(_transposed_table)),
    Answer("pages in the opposite order", _pages(_reversed_table)),
    Answer("wrong head map", _altered(_wrong_heads)),
    Answer("last page ignored", _without_last_page),
    Answer("last page read whole", _full_last_page),
    Answer("natural-log LSE", _lse(lambda lse: lse * math.log(2.0))),
    Answer("LSE without the maximum", _lse(lambda lse: lse - lse.floor())),
    Answer("rotary part of the query ignored", _without_rope_part),
)


def _on_tensor_cores(subject: Subject) -> Tensors | None:
    """Logits in float32 that is cut off after every few products, as tensor cores do; None for float32's."""
    operands = operands_of(subject)
    if operands.q.dtype not in HALVES:
        return None
    precision = Precision(torch.float32, operands.q.dtype, instruction=PRODUCTS)
    return subject.rounded(attention(operands, precision))


def _online(subject: Subject) -> Tensors:
    """Online softmax over tiles of keys, weights rounded to the inputs' dtype before the second product."""
    return subject.rounded(_tiled(operands_of(subject), TILE))


def _split(subject: Subject) -> Tensors:
    """Two halves of the keys, merged by their LSE in float32."""
    operands = operands_of(subject)
    longest = max((len(span.rows) for span in operands.spans), default=1)
    return subject.rounded(_tiled(operands, max(1, -(-longest // 2))))


def _reversed(subject: Subject) -> Tensors | None:
    """The keys summed in the opposite order, where the mask allows it."""
    operands = operands_of(subject)
    if any(span.causal for span in operands.spans):
        return None
    return naive(subject, _spans(operands, lambda span: span.rows.flip(0)))


def _tiled(operands: Operands, tile: int) -> Tensors:
    """Tiles computed one by one and merged: o = sum(o_i 2**lse_i) / sum(2**lse_i), in float32."""
    precision = Precision(torch.float32, operands.q.dtype)
    longest = max((len(span.rows) for span in operands.spans), default=0)
    merged: Tensors | None = None
    for start in range(0, max(longest, 1), tile):
        part = _merge(merged, attention(_window(operands, start, tile), precision))
        merged = part
    assert merged is not None
    return merged


def _window(operands: Operands, start: int, tile: int) -> Operands:
    """Only keys [start, start + tile) of each sequence; causal spans become one span per query."""
    spans: list[Span] = []
    for span in operands.spans:
        length = len(span.rows)
        for query in range(span.start, span.stop):
            seen = length - (span.stop - 1 - query) if span.causal else length
            rows = span.rows[start : max(start, min(start + tile, seen))]
            spans.append(Span(query, query + 1, rows, causal=False))
    return replace(operands, spans=tuple(spans))


def _merge(one: Tensors | None, other: Tensors) -> Tensors:
    if one is None:
        return other
    top = torch.maximum(one["lse"], other["lse"])
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    weights = [torch.exp2(part["lse"] - top) for part in (one, other)]
    total = weights[0] + weights[1]
    safe = torch.where(total == 0, torch.ones_like(total), total)
    mixed = sum(part["output"] * (w / safe)[..., None] for part, w in zip((one, other), weights, strict=True))
    assert isinstance(mixed, torch.Tensor)
    return {"output": mixed, "lse": top + torch.log2(total)}


RIGHT = (
    Answer("naive, weights rounded", lambda subject: naive(subject, operands_of(subject))),
    Answer(
        "float32 throughout",
        lambda subject: subject.rounded(attention(operands_of(subject), Precision(torch.float32, torch.float32))),
    ),
    Answer("summed by tensor cores", _on_tensor_cores),
    Answer("online softmax", _online),
    Answer("split KV, merged", _split),
    Answer("keys in the opposite order", _reversed),
)

ANSWERS = Answers(RIGHT, WRONG)
