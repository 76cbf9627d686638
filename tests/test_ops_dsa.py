"""Sparse attention: lists of indices, and the scores of the top-k indexer."""

from __future__ import annotations

import math

import op_support as ops
import planted_attention as planted
import pytest
import torch

from traceproof.ops import registry
from traceproof.ops.answers import answers_of
from traceproof.ops.attention_inputs import POISON
from traceproof.ops.base import Unsupported
from traceproof.ops.families.sparse import unpack
from traceproof.reasons import Verdict
from traceproof.run.case import solve

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE, TOPK = 16, 64
INDEXER, SPARSE = planted.indexer(), planted.sparse()
OP = registry.get("dsa_paged")


def test_indexer_lengths_lie_on_both_sides_of_topk_and_of_a_page() -> None:
    lengths = {length for case in ops.cases(INDEXER) for length in case.params["seq_lens"]}
    assert {0, 1, PAGE - 1, PAGE, PAGE + 1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK} <= lengths
    for case in ops.cases(INDEXER, "small", "medium", "large"):
        assert case.axes["max_num_pages"] * PAGE >= TOPK
        assert OP.memory(INDEXER, case) > 0


def test_an_indexer_s_scales_spread_over_powers_of_two() -> None:
    inputs = ops.inputs_of(INDEXER, ops.case_named(INDEXER, "adversarial-plain"))
    _, scales = unpack(ops.tensor(inputs, "k_index_cache_fp8"))
    assert set(torch.frexp(scales[scales < 4]).exponent.tolist()) == {-1, 0, 1, 2}
    assert int(ops.tensor(inputs, "block_table").max()) < len(ops.tensor(inputs, "k_index_cache_fp8"))


def test_when_relu_cuts_everything_any_choice_is_right_but_not_any_number() -> None:
    subject = solve(INDEXER, ops.case_named(INDEXER, "adversarial-zero"))
    assert not subject.oracle["topk_indices@scores"].clamp(min=-1).max(dim=1).values.any()
    answers = answers_of("dsa_paged")
    assert answers is not None
    mutants = {mutant.name: mutant for mutant in answers.wrong}
    for name, verdict in (("worst instead of best", Verdict.PASS), ("one index left out", Verdict.FAIL)):
        outputs = mutants[f"indexer: {name}"].make(subject)
        assert outputs is not None
        assert subject.ruling("topk_indices", outputs["topk_indices"]).verdict == verdict


@pytest.mark.parametrize("change", [{"packed": 136}, {"kv_heads": 2}])
def test_unknown_layouts_are_said_to_be_unknown(change: dict[str, int]) -> None:
    with pytest.raises(Unsupported, match="last axes"):
        OP.check(planted.indexer(**change))


def test_sparse_lists_are_distinct_padded_and_never_name_the_ends_of_the_pool() -> None:
    counts = set()
    for case in ops.cases(SPARSE):
        inputs = ops.inputs_of(SPARSE, case)
        lists = ops.tensor(inputs, "sparse_indices")
        pool = math.prod(ops.tensor(inputs, "ckv_cache").shape[:2])
        for row, valid in zip(lists, case.params["valid"], strict=True):
            named = row[row >= 0]
            assert len(named) == len(torch.unique(named)) == valid
            assert not len(named) or (int(named.min()) > 0 and int(named.max()) < pool - 1)
            assert (row[row < 0] == -1).all()
            counts.add(valid)
        cache = ops.tensor(inputs, "ckv_cache").flatten(0, 1)
        unnamed = torch.ones(pool, dtype=torch.bool)
        unnamed[lists[lists >= 0].long()] = False
        assert (cache[unnamed, cache.shape[1] // 2] == POISON).all()
    assert {0, 1, planted.TOPK - 1, planted.TOPK} <= counts


def test_sparse_holes_lie_between_the_indices() -> None:
    case = ops.case_named(SPARSE, "adversarial-holes")
    first = ops.tensor(ops.inputs_of(SPARSE, case), "sparse_indices")[0]
    assert (first.diff().sign() != 0).any()
    padding = (first == -1).nonzero().flatten()
    assert int(padding.min()) < case.params["valid"][0]


def test_inputs_that_leave_one_choice_are_not_told_apart() -> None:
    """With fewer tokens than topk all are chosen, whatever the scores: the same page means the same answer."""
    case = next(case for case in ops.cases(INDEXER) if case.axes["batch_size"])
    inputs = ops.inputs_of(INDEXER, case)
    short = inputs | {"seq_lens": torch.full_like(ops.tensor(inputs, "seq_lens"), TOPK // 2)}
    other = short | {"weights": torch.flip(ops.tensor(short, "weights"), (-1,))}
    assert not OP.tells_apart(INDEXER, short, other)
    assert OP.tells_apart(INDEXER, short, short | {"block_table": ops.tensor(short, "block_table").flip(-1)})
