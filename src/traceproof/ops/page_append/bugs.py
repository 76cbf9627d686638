"""Answers of page_append."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.formula import Wide, by
from traceproof.ops.page_append.oracle import appended, at, places


def _token_by_token(wide: Wide) -> Tensors:
    keys, values = wide["k_cache"].clone(), wide["v_cache"].clone()
    pages, rows = places(wide)
    for token, (page, row) in enumerate(zip(pages.tolist(), rows.tolist(), strict=True)):
        keys[page, row] = wide["append_key"][token]
        values[page, row] = wide["append_value"][token]
    return {"k_cache_out": keys, "v_cache_out": values}


def _flat(wide: Wide) -> Tensors:
    """Rows of the caches as one list."""
    pages, rows = places(wide)
    found = {}
    for name, given in (("k_cache", "append_key"), ("v_cache", "append_value")):
        cache = wide[name].clone()
        cache.flatten(0, 1).index_copy_(0, pages * cache.shape[1] + rows, wide[given])
        found[f"{name}_out"] = cache
    return found


def _with(name: str, change: Callable[[Wide], dict[str, torch.Tensor]]) -> Answer:
    """What other inputs give."""
    return by(name, lambda wide: appended(wide.changed(**change(wide))))


def _exchanged(wide: Wide) -> Tensors:
    """The row's number taken for the page's place in the table, and the other way round."""
    size, positions = wide["k_cache"].shape[1], wide["positions"].long()
    most = len(wide["kv_indices"]) - 1
    page = wide["kv_indices"].long()[(positions % size).clamp_max(most)]
    return at(wide, page, (positions // size) % size)


def _within(wide: Wide, step: int) -> dict[str, torch.Tensor]:
    """Positions moved by a step, within the first page's rows and the table."""
    return {"positions": (wide["positions"].long() + step).clamp_min(0) % wide["k_cache"].shape[1]}


ANSWERS = Answers(
    right=(by("all at once", appended), by("token by token", _token_by_token), by("flat rows", _flat)),
    wrong=(
        _with("pages in their own order", lambda wide: {"kv_indices": torch.arange(len(wide["kv_indices"]))}),
        _with("one row further", lambda wide: _within(wide, 1)),
        _with(
            "always the first sequence", lambda wide: {"batch_indices": torch.zeros_like(wide["batch_indices"])}
        ),
        _with("always the first page of a sequence", lambda wide: _within(wide, 0)),
        _with("keys for values", lambda wide: {"append_value": wide["append_key"]}),
        _with("values of the next token", lambda wide: {"append_value": wide["append_value"].roll(1, 0)}),
        _with(
            "tokens in the opposite order",
            lambda wide: {name: wide[name].flip(0) for name in ("append_key", "append_value")},
        ),
        by("nothing appended", lambda wide: {f"{name}_out": wide[name] for name in ("k_cache", "v_cache")}),
        _with(
            "the rest set to zero",
            lambda wide: {name: torch.zeros_like(wide[name]) for name in ("k_cache", "v_cache")},
        ),
        by("page and row exchanged", _exchanged),
    ),
)
