"""The gated delta rule's scale, states, inputs, cases and estimates of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_support as ops
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Unsupported
from traceproof.ops.cases import Case
from traceproof.ops.families.gdn import BUFFER, CHUNK
from traceproof.ops.families.gdn import GDN as OP
from traceproof.ops.formula import Variant
from traceproof.ops.gates import plain_softplus
from traceproof.reasons import Verdict
from traceproof.run.case import solved

DECODE = ops.load("gdn", "gdn_decode_qk2_v4_d32_k_last")
MTP = ops.load("gdn", "gdn_mtp_qk2_v4_d32_k_last")
PREFILL = ops.load("gdn", "gdn_prefill_qk2_v4_d32_k_last")


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


def test_a_sequence_without_tokens_keeps_its_state() -> None:
    values = ops.inputs_of(PREFILL, ops.case_named(PREFILL, "edge-empty-sequence"))
    empty = ops.tensor(values, "cu_seqlens").diff() == 0
    old, new = ops.tensor(values, "state").double(), OP.oracle(PREFILL, values)["new_state"]
    assert [torch.equal(one, other) for one, other in zip(old, new, strict=True)] == empty.tolist()


def test_other_slots_of_the_pool_stay() -> None:
    values = ops.inputs_of(MTP, ops.case_named(MTP, "medium-0"))
    slots = set(ops.tensor(values, "initial_state_indices").tolist())
    old, new = ops.tensor(values, "initial_state").double(), OP.oracle(MTP, values)["final_state"]
    assert 0 < len(slots) < len(old)
    assert all(torch.equal(old[slot], new[slot]) == (slot not in slots) for slot in range(len(old)))


def test_a_given_buffer_may_be_overwritten() -> None:
    values = ops.inputs_of(MTP, ops.case_named(MTP, "edge-buffer"))
    before = ops.tensor(values, BUFFER).clone()
    ops.reference(MTP, values)
    assert not torch.equal(before, ops.tensor(values, BUFFER))
    assert OP.mutated(MTP) == {BUFFER}
    assert not OP.mutated(DECODE)


@pytest.mark.parametrize("definition", [DECODE, MTP], ids=["decode", "mtp"])
def test_a_gate_may_lose_a_few_roundings(definition: Definition) -> None:
    """lg2.approx errs by 2**-22, ex2.approx by as much of its result; what loses more is a mutant."""
    hardware = OP.answer(
        Variant(
            "hardware functions",
            growth=lambda x: plain_softplus(x) + 2.0**-22,
            faded=lambda decay: decay * (1 + 2.0**-21),
        )
    )
    for subject in solved(definition, ("small", "medium"), 0):
        outputs = hardware.make(subject)
        assert outputs is not None
        for name, value in outputs.items():
            assert subject.ruling(name, value).verdict == Verdict.PASS, (subject.case.id, name)


@pytest.mark.parametrize("definition", [DECODE, MTP, PREFILL], ids=["decode", "mtp", "prefill"])
def test_keys_have_norm_one(definition: Definition) -> None:
    values = ops.inputs_of(definition, ops.case_named(definition, "medium-1"))
    norms = ops.tensor(values, "k").double().norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=5e-3)


def test_lengths_cover_chunk_boundaries() -> None:
    lengths = {one for case in ops.cases(PREFILL, "small", "medium", "large") for one in case.params["lengths"]}
    assert {0, 1, CHUNK - 1, CHUNK, CHUNK + 1} <= lengths


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
