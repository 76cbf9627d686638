"""Attention: the oracle is right, inputs show what they should, and bugs of precision are seen."""

from __future__ import annotations

import itertools
import math
from typing import Any

import op_support as ops
import planted_attention as planted
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops import registry
from traceproof.ops.answers import answers_of
from traceproof.ops.attention import operands_of
from traceproof.ops.attention_inputs import PageTable
from traceproof.ops.base import Op, Tensors, Unsupported
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve

# At amplitude 3 few tokens hold all the weight, so one that no head leans to may come or go without a trace. The
# largest logit is far from where float32 needs it to be subtracted.
FAINT_WHEN_LONG = {
    "one token dropped",
    "one token twice",
    "first token dropped",
    "last page read whole",
    "no maximum subtracted",
}
pytestmark = pytest.mark.usefixtures("one_thread")


def op_of(definition: Definition) -> Op:
    op, unknown = registry.for_definition(definition)
    assert unknown is None
    return op


def passes(subject: SolvedCase, outputs: Tensors) -> bool:
    return all(subject.ruling(name, outputs[name]).verdict == Verdict.PASS for name in subject.definition.outputs)


@pytest.mark.parametrize("name", planted.FORMS)
def test_mutants_fail_on_long_sequences_too(name: str) -> None:
    definition = planted.form(name)
    subject = solve(definition, ops.case_named(definition, "adversarial-long"))
    answers = answers_of(definition.op_type)
    assert answers is not None
    right = answers.right[0].make(subject)
    assert right is not None
    given = {mutant.name: mutant.make(subject) for mutant in answers.wrong}
    made = {mutant: outputs for mutant, outputs in given.items() if outputs is not None}
    changed = {m: o for m, o in made.items() if any(not torch.equal(o[n], right[n]) for n in right)}
    assert len(changed) > 8
    assert {mutant for mutant, outputs in changed.items() if passes(subject, outputs)} <= FAINT_WHEN_LONG


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (10, 2), (12, 2), (16, 2), (5, 5)])
def test_any_head_ratio(heads: int, kv_heads: int) -> None:
    definition = planted.gqa(prefill=True, page=16, heads=heads, kv_heads=kv_heads)
    subject = solve(definition, ops.case_named(definition, "small-1"))
    answers = answers_of(definition.op_type)
    assert answers is not None
    given = [variant.make(subject) for variant in answers.right]
    assert all(passes(subject, outputs) for outputs in given if outputs is not None)


@pytest.mark.parametrize("case_id", ["stress-above", "stress-below", "stress-deep"])
def test_a_log_sum_exp_may_lose_what_hopper_cuts_off_logits_of_60000_and_not_four_times_it(case_id: str) -> None:
    definition = planted.mla(prefill=False, page=64, heads=16, ckv=512, kpe=64)
    (case,) = (case for case in op_of(definition).stress(definition, seed=0) if case.id == case_id)
    subject = solve(definition, case)
    operands, exact = operands_of(subject.inputs), subject.oracle["lse"]
    found = exact.clone()
    for span in operands.spans:
        logits = on_hopper(operands.q[span.start], operands.k[span.rows, 0]) * operands.scale
        found[span.start] = torch.logsumexp(logits, -1) / math.log(2.0)
    right, wrong = (subject.ruling("lse", lse.float()) for lse in (found, found + 3 * (found - exact)))
    assert 0.2 < right.details["gate"]["margin"] < 0.75
    assert wrong.verdict == Verdict.FAIL


def on_hopper(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Products of queries [H, D] and keys [L, D] as docs/findings-gpu.md, G4, says that tensor cores sum them."""
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


@pytest.mark.parametrize("name", planted.FORMS)
def test_oracle_agrees_with_torch_attention_in_float64(name: str) -> None:
    definition = planted.form(name)
    op = op_of(definition)
    for case in ops.cases(definition, "small"):
        operands = operands_of(ops.inputs_of(definition, case))
        exact = op.oracle(definition, ops.inputs_of(definition, case))
        for span in operands.spans:
            length, count = len(span.rows), span.stop - span.start
            first = max(0, count - length) if span.causal else 0  # queries before it see nothing
            if not length or first == count:
                continue
            q = operands.q[span.start + first : span.stop].double().transpose(0, 1)
            k, v = (t[span.rows].double().transpose(0, 1) for t in (operands.k, operands.v))
            mask = torch.ones(count - first, length, dtype=torch.bool)
            if span.causal:
                mask = mask.tril(length - (count - first))
            expected = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=operands.scale, enable_gqa=True
            )[0].transpose(0, 1)
            actual = exact["output"][span.start + first : span.stop]
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_lse_is_in_base_two() -> None:
    definition = planted.gqa(prefill=False, page=1, heads=1, kv_heads=1)
    op = op_of(definition)
    (case,) = (case for case in ops.cases(definition) if case.id == "adversarial-ties")
    inputs = ops.inputs_of(definition, case)
    inputs["q"] = torch.zeros_like(ops.tensor(inputs, "q"))
    lengths = ops.tensor(inputs, "kv_indptr").diff().tolist()
    expected = [math.log2(length) for length in lengths]
    assert op.oracle(definition, inputs)["lse"].flatten().tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", ["gqa_paged_prefill", "gqa_ragged", "mla_ragged", "mla_paged_prefill"])
def test_queries_without_a_key_give_zero_and_minus_infinity(name: str) -> None:
    definition = planted.form(name)
    op = op_of(definition)
    (case,) = (case for case in ops.cases(definition) if case.id == "edge-q-longer")
    inputs = ops.inputs_of(definition, case)
    for results in (op.oracle(definition, inputs), op.baseline(definition, inputs)):
        empty = []
        starts = ops.tensor(inputs, "qo_indptr").tolist()
        for start, q_len, kv_len in zip(starts, case.params["q_lens"], case.params["kv_lens"], strict=False):
            empty += [start + index for index in range(max(0, q_len - kv_len))]
        assert len(empty) == 5
        assert not results["output"][empty].any()
        assert torch.equal(torch.isinf(results["lse"]).any(-1).nonzero().flatten(), torch.tensor(empty))


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


def test_shared_pages_are_full_ones_of_the_first_sequence() -> None:
    pages = PageTable.of([40, 33, 8, 70], 16, shared=True)
    table = pages.table(Draw(definition="d", case="c", seed=0, device=ops.CPU))
    assert [len(ids) for ids in table] == [3, 3, 1, 5]
    assert pages.shared == [0, 1, 0, 1]
    assert table[0][0] == table[1][0] == table[3][0]
    assert len({page for ids in table for page in ids}) == pages.distinct == 10


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": {"shape": ["batch_size", "D"], "dtype": "bfloat16"}}, "q has the shape"),
        (
            {"mask": {"shape": ["batch_size"], "dtype": "bool"}},
            "have unknown ['mask']",
        ),
        ({"kv_last_page_len": None}, "no kv_last_page_len"),
        (
            {"kv_indptr": None},
            "inputs lack ['kv_indptr']",
        ),
        (
            {"v_cache": {"shape": ["num_pages", "page_size", "D", "Dv"], "dtype": "bfloat16"}},
            "v_cache has the shape",
        ),
        (
            {"k_cache": {"shape": ["num_pages", "page_size", "Hkv", "D"], "dtype": "float8_e4m3fn"}},
            "scaled storage",
        ),
        ({"q": {"shape": ["batch_size", "num_pages", "D"], "dtype": "bfloat16"}}, "output has the shape"),
        ({}, "no multiple"),
    ],
)
def test_unknown_forms_are_said_to_be_unknown(change: dict[str, Any], says: str) -> None:
    document = planted.gqa(prefill=False, page=16, heads=6, kv_heads=5 if says == "no multiple" else 2).as_json()
    inputs = {**document["inputs"], **change}
    document["inputs"] = {name: spec for name, spec in inputs.items() if spec is not None}
    with pytest.raises(Unsupported) as caught:
        registry.get("gqa_paged").check(Definition.model_validate(document))
    assert says in str(caught.value)
