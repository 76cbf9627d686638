"""Attention, dense and sparse: the oracle is right, inputs show what they should, bugs of precision are seen."""

from __future__ import annotations

import itertools
import math

import op_support as ops
import planted_attention as planted
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.attention import operands_of
from traceproof.ops.attention_inputs import POISON
from traceproof.ops.families.sparse import unpack
from traceproof.ops.op import Op
from traceproof.reasons import Verdict
from traceproof.run.case import solve

# At amplitude 3 few tokens hold all the weight, so one that no head leans to may come or go without a trace. The
# largest logit is far from where float32 needs it to be subtracted.
pytestmark = pytest.mark.usefixtures("one_thread")


def op_of(definition: Definition) -> Op:
    op, unknown = registry.for_definition(definition)
    assert unknown is None
    return op


@pytest.mark.parametrize("case_id", ["stress-above", "stress-below", "stress-deep"])
def test_a_log_sum_exp_may_lose_what_hopper_cuts_off_logits_of_60000_and_not_four_times_it(case_id: str) -> None:
    definition = planted.mla(prefill=False, page=64, heads=16, ckv=512, kpe=64)
    (case,) = (case for case in op_of(definition).stress(definition, seed=0) if case.id == case_id)
    subject = solve(definition, case)
    operands, exact = operands_of(definition, subject.inputs), subject.oracle["lse"]
    found = exact.clone()
    for span in operands.spans:
        logits = on_hopper(operands.q[span.start], operands.k[span.rows, 0]) * operands.scale
        found[span.start] = torch.logsumexp(logits, -1) / math.log(2.0)
    right, wrong = (subject.ruling("lse", lse.float()) for lse in (found, found + 3 * (found - exact)))
    assert 0.2 < right.details["gate"]["margin"] < 0.75
    assert wrong.verdict == Verdict.FAIL


def on_hopper(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Products of queries [H, D] and keys [L, D] as docs/findings.md, G4, says that tensor cores sum them."""
    products, size = queries.double()[:, None] * keys.double(), exponent(queries)[:, None] + exponent(keys)
    total = torch.zeros(products.shape[:2], dtype=torch.float64)
    for first in range(0, queries.shape[-1], 16):
        part, parts = products[..., first : first + 16], size[..., first : first + 16]
        unit = torch.exp2((torch.maximum(parts.amax(-1), exponent(total)) - 25).double())
        total = cut(part, unit[..., None]).sum(-1) + cut(total, unit)
        total = cut(total, torch.exp2((exponent(total) - 23).double()))
    return total


def exponent(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, -99, torch.frexp(values.double()).exponent - 1)


def cut(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.trunc(values / unit) * unit


@pytest.mark.parametrize(("page", "prefill"), list(itertools.product((1, 3, 16, 64, 200), (False, True))))
def test_page_tables_are_permuted_with_gaps_and_lengths_reach_boundaries(page: int, *, prefill: bool) -> None:
    definition = planted.gqa(prefill=prefill, page=page)
    lengths: set[int] = set()
    shared = 0
    for case in ops.cases(definition):
        lengths.update(case.params["kv_lens"])
        inputs = ops.inputs_of(definition, case)
        ids = ops.tensor(inputs, "kv_indices").tolist()
        indptr = ops.tensor(inputs, "kv_indptr").tolist()
        assert indptr[0] == 0
        assert indptr[-1] == len(ids)
        assert ids != list(range(len(ids))) or not ids
        assert all(0 <= index < case.axes["num_pages"] for index in ids)
        assert len(set(ids)) < case.axes["num_pages"]
        for first, stop in itertools.pairwise(indptr):
            assert len(set(ids[first:stop])) == stop - first
        shared += len(ids) - len(set(ids))
        if page > 1:
            last = ops.tensor(inputs, "kv_last_page_len").tolist()
            assert [
                (stop - first - 1) * page + tail if stop > first else tail
                for first, stop, tail in zip(indptr, indptr[1:], last, strict=False)
            ] == case.params["kv_lens"]
    boundary = page * -(-64 // page)
    assert {0, 1, boundary - 1, boundary, boundary + 1, 256, 2048} <= lengths
    assert shared > 0


def test_last_page_length_of_an_indptrs_size_is_filled_and_read() -> None:
    published, right = (planted.gqa(prefill=False, page=16, last=axis) for axis in ("len_indptr", "batch_size"))
    op = op_of(published)
    for wrong_case, right_case in zip(ops.cases(published), ops.cases(right), strict=True):
        inputs, expected = ops.inputs_of(published, wrong_case), ops.inputs_of(right, right_case)
        lens = ops.tensor(inputs, "kv_last_page_len")
        assert len(lens) == wrong_case.axes["len_indptr"]
        assert torch.equal(lens[:-1], ops.tensor(expected, "kv_last_page_len"))
        results = op.oracle(published, inputs), op.oracle(right, expected)
        assert torch.equal(results[0]["lse"], results[1]["lse"])


# Sparse attention: lists of indices, and the scores of the top-k indexer.

PAGE, TOPK = 16, 64
INDEXER, SPARSE = planted.indexer(), planted.sparse()
DSA = registry.get("dsa_paged")


def test_an_indexer_s_lengths_meet_topk_and_a_page_and_its_scales_spread_over_powers_of_two() -> None:
    lengths = {length for case in ops.cases(INDEXER) for length in case.params["seq_lens"]}
    assert {0, 1, PAGE - 1, PAGE, PAGE + 1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK} <= lengths
    for case in ops.cases(INDEXER, "small", "medium", "large"):
        assert case.axes["max_num_pages"] * PAGE >= TOPK
        assert DSA.of_form(INDEXER).memory(INDEXER, case) > 0
    inputs = ops.inputs_of(INDEXER, ops.case_named(INDEXER, "adversarial-plain"))
    cache = ops.tensor(inputs, "k_index_cache_fp8")
    _, scales = unpack(cache)
    assert set(torch.frexp(scales[scales < 4]).exponent.tolist()) == {-1, 0, 1, 2}
    assert int(ops.tensor(inputs, "block_table").max()) < len(cache)


def test_when_relu_cuts_everything_any_choice_is_right_but_not_any_number() -> None:
    subject = solve(INDEXER, ops.case_named(INDEXER, "adversarial-zero"))
    assert not subject.oracle["topk_indices@scores"].clamp(min=-1).max(dim=1).values.any()
    mutants = {mutant.name: mutant for mutant in registry.mutants_of(INDEXER)}
    for name, verdict in (("worst instead of best", Verdict.PASS), ("one index left out", Verdict.FAIL)):
        outputs = mutants[f"indexer: {name}"].make(subject)
        assert outputs is not None
        assert subject.ruling("topk_indices", outputs["topk_indices"]).verdict == verdict


def test_sparse_lists_are_distinct_padded_and_never_name_the_ends_of_the_pool() -> None:
    counts = set()
    for case in ops.cases(SPARSE):
        inputs = ops.inputs_of(SPARSE, case)
        lists = ops.tensor(inputs, "sparse_indices")
        pool = math.prod(ops.tensor(inputs, "ckv_cache").shape[:2])
        for row, valid in zip(lists, case.params["kv_lens"], strict=True):
            named = row[row >= 0]
            assert len(named) == len(torch.unique(named)) == valid
            assert not len(named) or (int(named.min()) > 0 and int(named.max()) < pool - 1)
            assert (row[row < 0] == -1).all()
            counts.add(valid)
        cache = ops.tensor(inputs, "ckv_cache").flatten(0, 1)
        unnamed = torch.ones(pool, dtype=torch.bool)
        unnamed[lists[lists >= 0].long()] = False
        assert (cache[unnamed, cache.shape[1] // 2] == POISON).all()
        if case.id == "adversarial-holes":
            assert int((lists[0] == -1).nonzero().min()) < case.params["kv_lens"][0]
    assert {0, 1, planted.TOPK - 1, planted.TOPK} <= counts


def test_inputs_that_leave_one_choice_are_not_told_apart() -> None:
    """With fewer tokens than topk all are chosen, whatever the scores: the same page means the same answer."""
    case = next(case for case in ops.cases(INDEXER) if case.axes["batch_size"])
    inputs = ops.inputs_of(INDEXER, case)
    short = inputs | {"seq_lens": torch.full_like(ops.tensor(inputs, "seq_lens"), TOPK // 2)}
    other = short | {"weights": torch.flip(ops.tensor(short, "weights"), (-1,))}
    op = op_of(INDEXER)
    assert not op.tells_apart(INDEXER, short, other)
    assert op.tells_apart(INDEXER, short, short | {"block_table": ops.tensor(short, "block_table").flip(-1)})
