"""The gated delta rule's scale, inputs, cases and estimates of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import op_support as ops
import pytest
import torch
from test_ops_gdn import CHUNK, DECODE, EVERY, PREFILL

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Unsupported
from traceproof.ops.cases import Case
from traceproof.ops.families.gdn import GDN as OP


@pytest.mark.parametrize("scale", [None, 0.0])
def test_no_scale_means_the_default(scale: float | None) -> None:
    values = ops.inputs_of(DECODE, ops.case_named(DECODE, "small-1"))
    default = OP.oracle(DECODE, values)
    for name, value in OP.oracle(DECODE, {**values, "scale": scale}).items():
        torch.testing.assert_close(value, default[name])


def test_decode_is_prefill_of_one_token() -> None:
    values = ops.inputs_of(DECODE, ops.case_named(DECODE, "medium-0"))
    batch = len(ops.tensor(values, "q"))
    per_token = {name: ops.tensor(values, name)[:, 0] for name in ("q", "k", "v", "a", "b")}
    prefill = OP.oracle(PREFILL, {**values, **per_token, "cu_seqlens": torch.arange(batch + 1)})
    decode = OP.oracle(DECODE, values)
    torch.testing.assert_close(prefill["output"], decode["output"][:, 0])
    torch.testing.assert_close(prefill["new_state"], decode["new_state"])


@EVERY
def test_keys_have_norm_one(definition: Definition) -> None:
    values = ops.inputs_of(definition, ops.case_named(definition, "medium-1"))
    norms = ops.tensor(values, "k").double().norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=5e-3)


def kinds_of_lengths() -> Iterator[int]:
    for case in ops.cases(PREFILL, "small", "medium", "large"):
        yield from case.params["lengths"]


def test_lengths_cover_chunk_boundaries() -> None:
    assert {0, 1, CHUNK - 1, CHUNK, CHUNK + 1} <= set(kinds_of_lengths())


def test_no_state_is_passed_only_where_the_schema_allows_it() -> None:
    entry = DECODE.as_json()
    entry["inputs"]["state"].pop("optional")
    strict = Definition.model_validate(entry)
    assert ops.inputs_of(DECODE, ops.case_named(DECODE, "edge-no-state"))["state"] is None
    assert all(case.id != "edge-no-state" for case in ops.cases(strict))


def test_memory_grows_with_the_states() -> None:
    small, large = (Case("x", "small", {"batch_size": batch}, 0, {"lengths": [1] * batch}) for batch in (1, 64))
    assert OP.memory(DECODE, large) > 64 * 4 * 32 * 32 * 8 * 3
    assert OP.memory(DECODE, small) < OP.memory(DECODE, large) / 32


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["inputs"].pop("A_log"),
        lambda entry: entry["inputs"].update(gate={"shape": None, "dtype": "float32"}),
        lambda entry: entry["axes"]["num_v_heads"].update(value=3),
        lambda entry: entry["axes"]["num_k_heads"].update(value=4),
        lambda entry: entry["axes"].update(head_size={"type": "var"}),
        lambda entry: entry["outputs"].pop("new_state"),
    ],
    ids=["no A_log", "an unknown input", "3 heads on 2", "other key heads", "head_size is var", "no state"],
)
def test_an_unknown_form_has_no_oracle(change: Callable[[dict[str, Any]], None]) -> None:
    entry = DECODE.as_json()
    change(entry)
    with pytest.raises(Unsupported):
        OP.check(Definition.model_validate(entry))
