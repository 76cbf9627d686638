"""Sequences over pages and over ragged rows: page tables, their axes, and reading them back."""

from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Unsupported, Values, tensor
from traceproof.ops.cases import Case
from traceproof.ops.common.attention import Span, const_size
from traceproof.ops.common.attention_cases import Plan
from traceproof.ops.common.attention_inputs import Sequences

# Ranks of the inputs that every paged attention has; the first and the last length may be left out.
TABLE_RANKS = {"qo_indptr": 1, "kv_indptr": 1, "kv_indices": 1, "kv_last_page_len": 1, "sm_scale": None}
GAP = 4  # one page in four more than needed, so that tables have gaps


def starts(lengths: list[int]) -> list[int]:
    """Prefix sums with a leading 0: an indptr."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of every sequence: their number, and how many of the first ones are those of sequence 0."""

    counts: list[int]
    shared: list[int]

    @classmethod
    def of(cls, kv_lens: list[int], page_size: int, *, shared: bool) -> "Pages":
        """Pages of sequences of these lengths; only full pages are shared, half of what could be."""
        counts = [-(-length // page_size) for length in kv_lens]
        full = [length // page_size for length in kv_lens]
        common = [(min(full[0], pages) + 1) // 2 if shared and row else 0 for row, pages in enumerate(full)]
        return cls(counts, common)

    @property
    def distinct(self) -> int:
        """Different pages in use."""
        return sum(self.counts) - sum(self.shared)

    @property
    def pool(self) -> int:
        """Pages to allocate: those in use and gaps, at least one."""
        return self.distinct + max(1, self.distinct // GAP)

    def table(self, draw: Draw) -> list[list[int]]:
        """Page ids of every sequence: distinct but for the shared ones, out of `pool`, never 0, 1, 2, ..."""
        drawn: list[int] = draw.permutation("kv_indices", self.distinct, out_of=self.pool).tolist()
        if drawn == list(range(self.distinct)):
            drawn = [page + 1 for page in drawn]
        table: list[list[int]] = []
        used = 0
        for count, common in zip(self.counts, self.shared, strict=True):
            fresh = drawn[used : used + count - common]
            table.append([*(table[0][:common] if table else []), *fresh])
            used += count - common
        return table


def paged_axes(definition: Definition, plan: Plan, *, query: str, cache: str, page_size: int) -> dict[str, int]:
    """Sizes of all var axes of a paged attention definition, told by where they stand in the inputs."""
    batch = len(plan.kv_lens)
    pages = Pages.of(plan.kv_lens, page_size, shared=plan.shared)
    sizes = {
        _axis(definition, query, 0): batch if plan.q_lens is None else sum(plan.q_lens),
        _axis(definition, cache, 0): pages.pool,
        _axis(definition, "kv_indices", 0): sum(pages.counts),
    }
    if "kv_last_page_len" in definition.inputs:  # before indptr: some definitions give both the same axis
        sizes.setdefault(_axis(definition, "kv_last_page_len", 0), batch)
    sizes[_axis(definition, "kv_indptr", 0)] = batch + 1
    return {name: sizes.get(name, batch) for name in definition.var_axes}  # batch: an axis that no shape uses


def _axis(definition: Definition, name: str, axis: int) -> str:
    return (definition.inputs[name].shape or ())[axis]


@dataclass(frozen=True, slots=True)
class Layout:
    """Drawn structure of a paged or ragged batch, on the host."""

    kv_lens: list[int]  # tokens of every sequence
    q_lens: list[int]  # query tokens of every sequence
    # page ids of every sequence; for ragged data there are no pages and this is None
    table: list[list[int]] | None
    page_size: int  # tokens a page

    def rows(self, device: torch.device) -> torch.Tensor:
        """int64 [sum of kv_lens]: where each token lies in the flattened cache."""
        if self.table is None:
            return torch.arange(sum(self.kv_lens), device=device)
        parts = [torch.empty(0, dtype=torch.int64)]
        offsets = torch.arange(self.page_size)
        for pages, length in zip(self.table, self.kv_lens, strict=True):
            ids = torch.tensor(pages, dtype=torch.int64)
            parts.append((ids[:, None] * self.page_size + offsets).view(-1)[:length])
        return torch.cat(parts).to(device)

    def sequences(self, device: torch.device, *, causal: bool) -> Sequences:
        """What each query sees."""
        first, visible, lengths = [], [], []
        for start, kv_len, q_len in zip(starts(self.kv_lens), self.kv_lens, self.q_lens, strict=False):
            for index in range(q_len):
                first.append(start)
                lengths.append(kv_len)
                visible.append(max(0, kv_len - q_len + index + 1) if causal else kv_len)
        return Sequences(self.rows(device), first, visible, lengths, self.page_size)

    def structure(self, definition: Definition, case: Case, device: torch.device) -> Values:
        """Those of qo_indptr, kv_indptr, kv_indices and kv_last_page_len that the definition has, int32."""
        table = self.table
        kv_units = self.kv_lens if table is None else [len(pages) for pages in table]
        full = [max(0, units - 1) * self.page_size for units in kv_units]
        lists = {
            "qo_indptr": starts(self.q_lens),
            "kv_indptr": starts(kv_units),
            "kv_indices": [page for pages in table or [] for page in pages],
            "kv_last_page_len": [length - done for length, done in zip(self.kv_lens, full, strict=True)],
        }
        values: Values = {}
        for name in lists.keys() & definition.inputs.keys():
            (size,) = definition.shape_of(definition.inputs[name], case.axes) or ()
            # Some definitions shape kv_last_page_len like an indptr: its last entry means nothing.
            padded = [*lists[name], *[0] * (size - len(lists[name]))]
            values[name] = torch.tensor(padded, dtype=torch.int32, device=device)
        return values


def paged_layout(case: Case, draw: Draw, *, page_size: int) -> Layout:
    """The layout of a planned case over a drawn page table."""
    kv_lens, q_lens = _lengths(case)
    params = case.params
    pages = Pages.of(kv_lens, page_size, shared=bool(params.get("shared")))
    return Layout(kv_lens, q_lens, pages.table(draw), page_size)


def ragged_layout(case: Case) -> Layout:
    """The layout of a planned case without pages."""
    return Layout(*_lengths(case), None, 1)


def _lengths(case: Case) -> tuple[list[int], list[int]]:
    kv_lens = list(case.params["kv_lens"])
    return kv_lens, list(case.params.get("q_lens", [1] * len(kv_lens)))


def read_spans(inputs: Values, *, page_size: int) -> tuple[Span, ...]:
    """The sequences that the structure tensors describe: paged if there are kv_indices, causal if a qo_indptr."""
    kv_indptr: list[int] = tensor(inputs, "kv_indptr").tolist()
    batch = len(kv_indptr) - 1
    causal = "qo_indptr" in inputs
    queries: list[int] = tensor(inputs, "qo_indptr").tolist() if causal else list(range(batch + 1))
    last = tensor(inputs, "kv_last_page_len").tolist() if "kv_last_page_len" in inputs else [page_size] * batch
    spans = []
    for row in range(batch):
        first, stop = kv_indptr[row], kv_indptr[row + 1]
        if "kv_indices" in inputs:
            ids = tensor(inputs, "kv_indices")[first:stop].to(torch.int64)
            slots = ids[:, None] * page_size + torch.arange(page_size, device=ids.device)
            length = (stop - first - 1) * page_size + last[row] if stop > first else 0
            rows = slots.view(-1)[: max(0, length)]
        else:
            rows = torch.arange(first, stop, device=tensor(inputs, "kv_indptr").device)
        spans.append(Span(queries[row], queries[row + 1], rows, causal))
    return tuple(spans)


def unread(rows: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Mask, bool [pages * page_size], of the rows of the flattened cache that are not in `rows`."""
    mask = torch.ones(cache.shape[0] * cache.shape[1], dtype=torch.bool, device=cache.device)
    mask[rows] = False
    return mask


def check_paged(definition: Definition, *, caches: tuple[str, str]) -> None:
    """Check the structure of a paged form.

    Raises Unsupported: pages of var or different sizes, pages that need a kv_last_page_len without one, or a var
    axis that stands nowhere this project can tell its size from.
    """
    sizes = [const_size(definition, cache, 1) for cache in caches]
    if sizes[0] != sizes[1] or sizes[0] < 1:
        raise Unsupported(f"page sizes of {caches} are {sizes}")
    if sizes[0] > 1 and "kv_last_page_len" not in definition.inputs:
        raise Unsupported(f"page_size is {sizes[0]} and there is no kv_last_page_len")
    query = next(iter(definition.inputs))
    known = {_axis(definition, name, 0) for name in (query, caches[0], "kv_indices", "kv_indptr")}
    if "kv_last_page_len" in definition.inputs:
        known.add(_axis(definition, "kv_last_page_len", 0))
    specs = (*definition.inputs.values(), *definition.outputs.values())
    used = {name for spec in specs for name in spec.shape or ()}
    stray = [name for name in definition.var_axes if name in used - known]
    if stray:
        raise Unsupported(f"can not tell the sizes of the axes {stray}")
