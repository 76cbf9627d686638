"""Relations of attention: pages, keys, heads, scales, the causal mask."""

import itertools
import math
from dataclasses import replace

import torch

from relations.building import (
    BATCH,
    Experiment,
    Outputs,
    Relation,
    other_inputs,
    permutation,
    permuted,
    reordered,
    scaled,
    times,
    unchanged,
)
from traceproof.dataset.definition import Definition
from traceproof.ops.base import Tensors, Values, taken
from traceproof.ops.batch import batch_of
from traceproof.ops.op import QUERIES, Subject

CACHES = ("k_cache", "v_cache", "ckv_cache", "kpe_cache", "k_index_cache_fp8")
LOG2E = math.log2(math.e)


def moved_pages(subject: Subject, order: torch.Tensor) -> Values:
    """Page p of every cache goes to place order[p]; the caches alone, no table."""
    back = torch.argsort(order)
    return {name: taken(subject.tensor(name), 0, back) for name in CACHES if name in subject.inputs}


def moved_rows(indices: torch.Tensor, order: torch.Tensor, page_size: int) -> torch.Tensor:
    """Row numbers of the flattened cache after its pages moved; negative ones name nothing and stay."""
    moved = order[indices.clamp_min(0).long() // page_size] * page_size + indices % page_size
    return torch.where(indices < 0, indices, moved.to(indices.dtype))


def page_count(subject: Subject) -> int:
    """Pages of the caches."""
    return subject.tensor(next(name for name in CACHES if name in subject.inputs)).shape[0]


def _pages(subject: Subject) -> Experiment | None:
    if not any(name in subject.inputs for name in CACHES) or page_count(subject) < 2:
        return None
    order = permutation(subject, page_count(subject))
    changes = moved_pages(subject, order)
    if "kv_indices" in subject.inputs:
        table = subject.tensor("kv_indices")
        changes["kv_indices"] = order[table.long()].to(table.dtype)
    else:
        page_size = subject.tensor("ckv_cache").shape[1]
        changes["sparse_indices"] = moved_rows(subject.tensor("sparse_indices"), order, page_size)
    return other_inputs(subject.with_inputs(**changes))


def merged(one: Tensors, other: Tensors) -> Tensors:
    """Attention over two sets of keys as one: outputs weighed by 2**lse; a row without keys stays 0 and -inf."""
    pair = [{name: value.double() for name, value in part.items()} for part in (one, other)]
    top = torch.maximum(pair[0]["lse"], pair[1]["lse"])
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    weights = [torch.exp2(part["lse"] - top) for part in pair]
    total = weights[0] + weights[1]
    safe = torch.where(total == 0, torch.ones_like(total), total)
    mixed = sum((part["output"] * (w / safe)[..., None] for part, w in zip(pair, weights, strict=True)))
    assert isinstance(mixed, torch.Tensor)
    lse = top + torch.log2(total)
    return {"output": mixed.to(one["output"].dtype), "lse": lse.to(one["lse"].dtype)}


def _merge_sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
    return merged(outputs[1], outputs[2]), dict(outputs[0])


def _kv_split(subject: Subject) -> Experiment | None:
    if not {"output", "lse"} <= subject.definition.outputs.keys() or "qo_indptr" in subject.inputs:
        return None
    if "sparse_indices" in subject.inputs:
        indices = subject.tensor("sparse_indices")
        first = torch.arange(indices.shape[1]) < indices.shape[1] // 2
        halves = (indices.masked_fill(~first, -1), indices.masked_fill(first, -1))
        return Experiment(tuple(subject.with_inputs(sparse_indices=half) for half in halves), _merge_sides)
    return Experiment(tuple(_half(subject, first=first) for first in (True, False)), _merge_sides)


def _half(subject: Subject, *, first: bool) -> Values:
    """The first half of each sequence's pages, all of them full, or the rest."""
    indptr = subject.tensor("kv_indptr").tolist()
    table, places, counts = subject.tensor("kv_indices"), [torch.empty(0, dtype=torch.int64)], [0]
    for start, stop in itertools.pairwise(indptr):
        middle = start + (stop - start) // 2
        low, high = (start, middle) if first else (middle, stop)
        places.append(torch.arange(low, high))
        counts.append(counts[-1] + high - low)
    changes: Values = {
        "kv_indices": table[torch.cat(places)],
        "kv_indptr": torch.tensor(counts, dtype=subject.tensor("kv_indptr").dtype),
    }
    if first and "kv_last_page_len" in subject.inputs:
        last = subject.tensor("kv_last_page_len")
        page = next(subject.tensor(name).shape[1] for name in CACHES if name in subject.inputs)
        empty = torch.tensor([stop == start for start, stop in itertools.pairwise(counts)])
        full = torch.where(empty, torch.zeros_like(last[: len(empty)]), page)
        changes["kv_last_page_len"] = torch.cat([full.to(last.dtype), last[len(empty) :]])
    return {**subject.inputs, **changes}


def _heads(subject: Subject) -> Experiment | None:
    """Key heads, each with its group of query heads, and query heads within a group."""
    queries = [name for name in QUERIES if name in subject.inputs]
    if not queries:
        return None
    heads = subject.tensor(queries[0]).shape[1]
    keys = [name for name in ("k_cache", "v_cache", "k", "v") if name in subject.inputs]
    kv_heads = subject.tensor(keys[0]).shape[-2] if keys else 1
    if heads < 2:
        return None
    of_keys = permutation(subject, kv_heads)
    inside = permutation(subject, heads // kv_heads)
    order = (of_keys[:, None] * (heads // kv_heads) + inside).flatten()
    changes = {name: subject.tensor(name)[:, order] for name in queries}
    changes |= {name: subject.tensor(name).index_select(-2, of_keys) for name in keys}
    return other_inputs(subject.with_inputs(**changes), right=reordered(order, 1))


def _query_scale(subject: Subject) -> Experiment | None:
    if "sm_scale" not in subject.inputs:
        return None
    changes = {name: 2 * subject.tensor(name) for name in QUERIES if name in subject.inputs}
    scale = float(subject.inputs["sm_scale"] or 0.0) / 2
    return other_inputs(subject.with_inputs(**changes, sm_scale=scale))


def _value_scale(subject: Subject) -> Experiment | None:
    if "ckv_cache" in subject.inputs:  # keys and values in one: what is done to the keys is undone in the queries
        changes = {"ckv_cache": 2 * subject.tensor("ckv_cache"), "q_nope": subject.tensor("q_nope") / 2}
    else:
        name = next((name for name in ("v_cache", "v") if name in subject.inputs), None)
        if name is None:
            return None
        changes = {name: 2 * subject.tensor(name)}
    return other_inputs(subject.with_inputs(**changes), right=times(2, "output"))


def _shift(subject: Subject) -> Experiment | None:
    """One channel of all keys at 0, then at 1: every logit of a query grows by the same."""
    key = next((name for name in ("kpe_cache", "k_cache", "k") if name in subject.inputs), None)
    if key is None:
        return None
    query = "q_pe" if "q_pe" in subject.inputs else "q"
    calls = []
    for value in (0, 1):
        keys = subject.tensor(key).clone()
        keys[..., -1] = value
        calls.append(subject.with_inputs(**{key: keys}))
    scale = float(subject.inputs.get("sm_scale") or subject.tensor(query).shape[-1] ** -0.5)
    grown = subject.tensor(query)[..., -1].double() * scale * LOG2E

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        low, high = dict(outputs[1]), dict(outputs[2])
        if "lse" in low:
            low["lse"] = (low["lse"].double() + grown).to(low["lse"].dtype)
        return high, low

    return Experiment(tuple(calls), sides)


def _last_queries(subject: Subject) -> Experiment | None:
    """Prefill of the last query of each sequence alone, as a decode would do it."""
    batch = batch_of(subject)
    if batch is None or "qo_indptr" not in subject.inputs:
        return None
    bounds = batch.bounds("qo_indptr")
    rows = torch.tensor([stop - 1 for start, stop in bounds if stop > start], dtype=torch.int64)
    if not len(rows):
        return None
    counts = torch.tensor([0, *(min(1, stop - start) for start, stop in bounds)]).cumsum(0)
    changes = {name: subject.tensor(name)[rows] for name in QUERIES if name in subject.inputs}
    values = subject.with_inputs(**changes, qo_indptr=counts.to(subject.tensor("qo_indptr").dtype))
    return other_inputs(values, right=lambda outputs: {name: value[rows] for name, value in outputs.items()})


PAGED = (
    *BATCH,
    Relation("pages permuted", _pages, exact=True),
    Relation("KV split and merged by LSE", _kv_split),
    Relation("heads permuted", _heads),
    Relation("q doubled, softmax scale halved", _query_scale, exact=True),
    Relation("values doubled", _value_scale, exact=True),
    Relation("softmax shift", _shift),
    Relation("last query of each sequence alone", _last_queries),
)


def _indexed_pages(subject: Subject) -> Experiment | None:
    if page_count(subject) < 2:
        return None
    order = permutation(subject, page_count(subject))
    table, page_size = subject.tensor("block_table"), subject.tensor("k_index_cache_fp8").shape[1]
    changes = {**moved_pages(subject, order), "block_table": order[table.long()].to(table.dtype)}
    return other_inputs(
        subject.with_inputs(**changes),
        right=lambda outputs: {name: moved_rows(value, order, page_size) for name, value in outputs.items()},
    )


def _indexer(definition: Definition) -> bool:
    return "k_index_cache_fp8" in definition.inputs


SPARSE = (
    *(replace(relation, holds=lambda definition: not _indexer(definition)) for relation in PAGED),
    *(
        replace(relation, holds=_indexer)
        for relation in (
            *BATCH,
            Relation("pages permuted", _indexed_pages),
            Relation("heads permuted", permuted({"weights": 1, "q_index_fp8": 1})),
            Relation("weights doubled", scaled("weights", output=unchanged)),
        )
    ),
)
