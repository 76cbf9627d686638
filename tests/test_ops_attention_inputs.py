"""Inputs of attention: page tables, lengths, shared pages, head ratios, and forms that are not known."""

from __future__ import annotations

import itertools
from typing import Any

import planted_attention as planted
import pytest
import torch
from test_ops_attention import CPU, cases, drawn, margin, op_of, tensor, tiled

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, fingerprint
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Unsupported
from traceproof.ops.common.paging import Pages

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", planted.FORMS)
def test_inputs_have_the_shapes_and_dtypes_of_the_definition(name: str) -> None:
    definition = planted.form(name)
    op = op_of(definition)
    seen = set()
    for case in cases(definition, "small", "medium", "large"):
        assert set(case.axes) == set(definition.var_axes)
        assert case.id not in seen
        seen.add(case.id)
        assert op.memory(definition, case) > 0
        if case.size == "large":
            continue
        inputs = drawn(op, definition, case)
        assert list(inputs) == list(definition.inputs)
        for key, spec in definition.inputs.items():
            value = inputs[key]
            if isinstance(value, torch.Tensor):
                assert tuple(value.shape) == definition.shape_of(spec, case.axes), (case.id, key)
                assert value.dtype == TORCH_DTYPES[spec.dtype], (case.id, key)
            else:
                assert isinstance(value, float)
                assert spec.shape is None
        fingerprints = [
            {
                key: fingerprint(value)
                for key, value in drawn(op, definition, case).items()
                if torch.is_tensor(value)
            }
            for _ in range(2)
        ]
        assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize(("page", "prefill"), list(itertools.product((1, 3, 16, 64, 200), (False, True))))
def test_page_tables_are_permuted_with_gaps_and_lengths_reach_boundaries(page: int, *, prefill: bool) -> None:
    definition = planted.gqa(prefill=prefill, page=page)
    op = op_of(definition)
    lengths: set[int] = set()
    shared = 0
    for case in cases(definition):
        lengths.update(case.params["kv_lens"])
        inputs = drawn(op, definition, case)
        ids = tensor(inputs, "kv_indices").tolist()
        indptr = tensor(inputs, "kv_indptr").tolist()
        assert indptr[0] == 0
        assert indptr[-1] == len(ids)
        assert ids != list(range(len(ids))) or not ids
        assert all(0 <= index < case.axes["num_pages"] for index in ids)
        assert len(set(ids)) < case.axes["num_pages"]
        for first, stop in itertools.pairwise(indptr):
            assert len(set(ids[first:stop])) == stop - first
        shared += len(ids) - len(set(ids))
        if page > 1:
            last = tensor(inputs, "kv_last_page_len").tolist()
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
    for wrong_case, right_case in zip(cases(published), cases(right), strict=True):
        inputs, expected = drawn(op, published, wrong_case), drawn(op, right, right_case)
        lens = tensor(inputs, "kv_last_page_len")
        assert len(lens) == wrong_case.axes["len_indptr"]
        assert torch.equal(lens[:-1], tensor(expected, "kv_last_page_len"))
        results = op.oracle(published, inputs), op.oracle(right, expected)
        assert torch.equal(results[0]["lse"], results[1]["lse"])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (10, 2), (12, 2), (16, 2), (5, 5)])
def test_any_head_ratio(heads: int, kv_heads: int) -> None:
    definition = planted.gqa(prefill=True, page=16, heads=heads, kv_heads=kv_heads)
    op = op_of(definition)
    inputs = drawn(op, definition, cases(definition, "small")[1])
    assert margin(definition, inputs, tiled(op.operands(definition, inputs), tile=5)) < 1


def test_shared_pages_are_full_ones_of_the_first_sequence() -> None:
    pages = Pages.of([40, 33, 8, 70], 16, shared=True)
    table = pages.table(Draw(definition="d", case="c", seed=0, device=CPU))
    assert [len(ids) for ids in table] == [3, 3, 1, 5]
    assert pages.shared == [0, 1, 0, 1]
    assert table[0][0] == table[1][0] == table[3][0]
    assert len({page for ids in table for page in ids}) == pages.distinct == 10


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": {"shape": ["batch_size", "D"], "dtype": "bfloat16"}}, "q has rank 2"),
        ({"mask": {"shape": ["batch_size"], "dtype": "bool"}}, "unknown ['mask']"),
        ({"kv_last_page_len": None}, "no kv_last_page_len"),
        ({"kv_indptr": None}, "lack ['kv_indptr']"),
        ({"v_cache": {"shape": ["num_pages", "page_size", "D", "Dv"], "dtype": "bfloat16"}}, "number of heads"),
        (
            {"k_cache": {"shape": ["num_pages", "page_size", "Hkv", "D"], "dtype": "float8_e4m3fn"}},
            "scaled storage",
        ),
        ({"q": {"shape": ["batch_size", "Dv", "D"], "dtype": "bfloat16"}}, "no multiple"),
    ],
)
def test_unknown_forms_are_said_to_be_unknown(change: dict[str, Any], says: str) -> None:
    document = planted.gqa(prefill=False, page=16, heads=6, kv_heads=5 if says == "no multiple" else 2).as_json()
    inputs = {**document["inputs"], **change}
    document["inputs"] = {name: spec for name, spec in inputs.items() if spec is not None}
    with pytest.raises(Unsupported) as caught:
        registry.get("gqa_paged").check(Definition.model_validate(document))
    assert says in str(caught.value)
