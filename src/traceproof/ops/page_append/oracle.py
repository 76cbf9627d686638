"""page_append: position p of sequence b is written to page kv_indices[kv_indptr[b] + p // size], row p % size."""

from collections.abc import Iterable, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import TORCH_DTYPES, Tensors, Unsupported, Values, ordered
from traceproof.ops.cases import Case
from traceproof.ops.compare import Exact
from traceproof.ops.formula import Form, FormulaOp, Wide

# Sequences, tokens appended to each, pages of each beside those that these fill.
SIZES = {"small": ((1, 1, 1), (2, 3, 2)), "medium": ((3, 5, 2), (4, 16, 3)), "large": ((16, 8, 4), (8, 64, 6))}
GAPS = 3  # pages that no sequence has
FORM = (
    "append_key[t h d] append_value[t h d] batch_indices[t] positions[t] k_cache[p s h d] v_cache[p s h d]"
    " kv_indices[i] kv_indptr[c] kv_last_page_len[b]? -> k_cache_out[p s h d] v_cache_out[p s h d]"
)


def places(wide: Wide) -> tuple[torch.Tensor, torch.Tensor]:
    """The page of each token and its row there."""
    size, positions = wide["k_cache"].shape[1], wide["positions"].long()
    starts = wide["kv_indptr"].long()[wide["batch_indices"].long()]
    return wide["kv_indices"].long()[starts + positions // size], positions % size


def appended(wide: Wide) -> Tensors:
    """Both caches with the tokens written; nothing is computed, so precision is none."""
    return at(wide, *places(wide))


def at(wide: Wide, page: torch.Tensor, row: torch.Tensor) -> Tensors:
    """Both caches with the tokens written to these rows of these pages."""
    found = {}
    for name, rows in (("k_cache", "append_key"), ("v_cache", "append_value")):
        cache = wide[name].clone()
        cache[page, row] = wide[rows]
        found[f"{name}_out"] = cache
    return found


class PageAppend(FormulaOp):
    """Sequences of equally many pages, whose tokens begin anywhere; pages in any order, with gaps."""

    def check(self, definition: Definition) -> None:
        """Known: the one form, pages of a const size."""
        size = (definition.inputs["k_cache"].shape or ("", ""))[1] if "k_cache" in definition.inputs else ""
        if size not in definition.const_axes:
            raise Unsupported("the page's size is no const axis")
        super().check(definition)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Ordinary sizes, no token at all, and tokens that begin in the last row of a page."""
        for size in sizes:
            for index, (batch, tokens, pages) in enumerate(SIZES[size]):
                yield self._case(definition, f"{size}-{index}", size, (batch, tokens, pages), seed)
        yield self._case(definition, "edge-empty", "edge", (1, 0, 1), seed)
        crossing = self._case(definition, "adversarial-crossing", "adversarial", (5, 4, 3), seed)
        yield Case(crossing.id, crossing.size, crossing.axes, seed, {**crossing.params, "crossing": True})

    def _case(self, definition: Definition, name: str, size: str, counts: tuple[int, int, int], seed: int) -> Case:
        batch, tokens, more = counts
        size_of = (definition.inputs["k_cache"].shape or ("", ""))[1]
        pages = more + tokens // definition.const_axes[size_of]
        wanted = {"t": batch * tokens, "p": batch * pages + GAPS, "i": batch * pages, "c": batch + 1, "b": batch}
        letters = self.form(definition).axes(definition)
        axes = {axis: wanted[letter] for letter, axis in letters.items() if axis in definition.var_axes}
        return Case(name, size, axes, seed, {"batch": batch, "tokens": tokens, "pages": pages})

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal keys, values and caches; the layout as the case says."""
        batch, tokens, pages = (int(case.params[name]) for name in ("batch", "tokens", "pages"))
        shapes = {name: definition.shape_of(spec, case.axes) or () for name, spec in definition.inputs.items()}
        dtypes = {name: TORCH_DTYPES[spec.dtype] for name, spec in definition.inputs.items()}
        size, last = shapes["k_cache"][1], shapes["k_cache"][1] * pages - tokens
        starts = draw.integers("starts", (batch, 1), torch.int64, low=0, high=last + 1)
        if case.params.get("crossing"):
            starts = torch.full_like(starts, size - 1)
        counted = torch.arange(batch, device=draw.device)
        layout = {
            "batch_indices": counted.repeat_interleave(tokens),
            "positions": (starts + torch.arange(tokens, device=draw.device)).reshape(-1),
            "kv_indices": draw.uniform("pages", (shapes["k_cache"][0],)).argsort()[: batch * pages],
            "kv_indptr": torch.arange(batch + 1, device=draw.device) * pages,
            "kv_last_page_len": ((starts[:, 0] + tokens - 1) % size + 1).clamp_min(1),
        }
        values: Values = {
            name: layout[name].to(dtypes[name])
            if name in layout
            else draw.normal(name, shapes[name], dtypes[name])
            for name in definition.inputs
        }
        return ordered(definition, values)


OP = PageAppend(
    "page_append",
    Form(FORM, appended),
    sizes={"t": (), "p": (), "i": (), "c": (), "b": ()},
    gates={"k_cache_out": Exact(), "v_cache_out": Exact()},
    apart=False,
)
