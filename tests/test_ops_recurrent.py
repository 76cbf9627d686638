"""Recurrent states (gated delta rule, selective state space): scale, states, gates, and what cases hold."""

from __future__ import annotations

import op_support as ops
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.families.gdn import BUFFER, CHUNK
from traceproof.ops.families.gdn import GDN as OP
from traceproof.ops.formula import Variant
from traceproof.ops.gates import plain_softplus
from traceproof.reasons import Verdict
from traceproof.run.case import solved

DECODE = ops.load("gdn", "gdn_decode_qk2_v4_d32_k_last")
MTP = ops.load("gdn", "gdn_mtp_qk2_v4_d32_k_last")
PREFILL = ops.load("gdn", "gdn_prefill_qk2_v4_d32_k_last")
MAMBA = pytest.mark.parametrize("definition", ops.definitions("mamba_ssu"), ids=lambda definition: definition.name)


@pytest.mark.parametrize("scale", [None, 0.0])
def test_no_scale_means_the_default(scale: float | None) -> None:
    values = ops.inputs_of(DECODE, ops.case_named(DECODE, "small-1"))
    default = OP.oracle(DECODE, values)
    for name, value in OP.oracle(DECODE, {**values, "scale": scale}).items():
        torch.testing.assert_close(value, default[name])


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
    hardware = Variant(
        "hardware functions",
        growth=lambda x: plain_softplus(x) + 2.0**-22,
        faded=lambda decay: decay * (1 + 2.0**-21),
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


@MAMBA
def test_slots_are_distinct_in_no_order_with_gaps_and_values_of_heads_are_spread(definition: Definition) -> None:
    padded = ops.inputs_of(definition, ops.case_named(definition, "edge-padding"))
    assert bool((ops.tensor(padded, "state_batch_indices") == -1).any())
    assert bool(ops.tensor(padded, "state")[-1].any())  # what -1 would read
    for case in (one for one in ops.cases(definition, "medium", "large") if one.size in {"medium", "large"}):
        values = ops.inputs_of(definition, case)
        slots = ops.tensor(values, "state_batch_indices").tolist()
        assert len(set(slots)) == len(slots)
        assert slots != sorted(slots)
        assert set(range(max(slots))) - set(slots)
        assert max(slots) < case.axes["state_cache_size"]
        A = ops.tensor(values, "A")
        assert torch.equal(A, A[:, :1, :1].expand_as(A))
        assert bool((A < 0).all())
        for name in ("dt", "D", "dt_bias"):
            value = ops.tensor(values, name)
            assert torch.equal(value, value[..., :1].expand_as(value))
            assert len(set(value[..., 0].flatten().tolist())) > 1
