"""The mamba_ssu op: cases that show wrong steps and wrong use of the state cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_support as ops
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Unsupported, Values
from traceproof.ops.families.mamba import MAMBA_SSU as OP

GROUPED = ops.load("mamba_ssu", "mamba_ssu_decode_h8_d16_s32_ng2")
DEFINITIONS = ops.definitions("mamba_ssu")
EVERY = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)


def stepped(_: Definition, values: Values, bug: str) -> list[torch.Tensor]:
    """A kernel of its own kind: all rows at once in float32, with a place for a mistake."""
    cache = ops.tensor(values, "state")
    x, dt, A, B, C, D, bias = (ops.tensor(values, n).float() for n in ("x", "dt", "A", "B", "C", "D", "dt_bias"))
    slots = ops.tensor(values, "state_batch_indices").long()
    shared = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(shared, 1), C.repeat_interleave(shared, 1)
    real = slots >= 0
    old = torch.where(real[:, None, None, None], cache[slots.clamp_min(0)].float(), 0.0)
    if bug == "padding reads the last slot":
        old = cache[slots].float()
    dt = dt + bias if bug == "no softplus" else F.softplus(dt + bias)
    decay = torch.exp((dt if bug != "A alone decays" else 1.0) * A[..., 0])[..., None]
    fresh = old * decay + (x if bug == "dt only decays" else dt * x)[..., None] * B[:, :, None]
    y = (fresh * C[:, :, None]).sum(-1) + D * x
    new = torch.zeros_like(cache) if bug == "other slots cleared" else cache.clone()
    new[slots[real]] = fresh[real].to(cache.dtype)
    if bug == "padding writes the last slot":
        new[slots] = fresh.to(cache.dtype)
    return [y.to(torch.bfloat16), new]


@EVERY
@pytest.mark.parametrize("bug", ["no softplus", "A alone decays", "dt only decays", "other slots cleared"])
def test_a_mistake_is_seen(definition: Definition, bug: str) -> None:
    assert ops.failures(definition, lambda of, values: stepped(of, values, bug))


@EVERY
@pytest.mark.parametrize("bug", ["padding reads the last slot", "padding writes the last slot"])
def test_padding_rows_have_no_slot(definition: Definition, bug: str) -> None:
    found = ops.failures(definition, lambda of, values: stepped(of, values, bug))
    assert {name.split()[0] for name in found} == {"edge-padding"}


@EVERY
def test_slots_are_distinct_in_no_order_with_gaps(definition: Definition) -> None:
    for case in ops.cases(definition, "medium", "large"):
        if case.size in {"medium", "large"}:
            slots = ops.tensor(ops.inputs_of(definition, case), "state_batch_indices").tolist()
            assert len(set(slots)) == len(slots)
            assert slots != sorted(slots)
            assert set(range(max(slots))) - set(slots)
            assert max(slots) < case.axes["state_cache_size"]


@EVERY
def test_per_head_values_are_spread(definition: Definition) -> None:
    values = ops.inputs_of(definition, ops.case_named(definition, "medium-0"))
    assert torch.equal(
        ops.tensor(values, "A"), ops.tensor(values, "A")[:, :1, :1].expand_as(ops.tensor(values, "A"))
    )
    for name in ("dt", "D", "dt_bias"):
        value = ops.tensor(values, name)
        assert torch.equal(value, value[..., :1].expand_as(value))
        assert len(set(value[..., 0].flatten().tolist())) > 1
    assert bool((ops.tensor(values, "A") < 0).all())


@EVERY
def test_slots_that_no_row_names_stay(definition: Definition) -> None:
    values = ops.inputs_of(definition, ops.case_named(definition, "edge-padding"))
    slots = set(ops.tensor(values, "state_batch_indices").tolist())
    old, new = ops.tensor(values, "state").double(), OP.oracle(definition, values)["new_state"]
    for slot in range(len(old)):
        assert torch.equal(old[slot], new[slot]) == (slot not in slots)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["inputs"].pop("dt_bias"),
        lambda entry: entry["inputs"]["A"].update(shape=["nheads"]),
        lambda entry: entry["axes"]["ngroups"].update(value=3),
        lambda entry: entry["axes"].update(dstate={"type": "var"}),
        lambda entry: entry["outputs"].pop("new_state"),
    ],
    ids=["an input is missing", "A by head", "groups do not divide", "dstate is var", "no new state"],
)
def test_an_unknown_form_has_no_oracle(change: Callable[[dict[str, Any]], None]) -> None:
    entry = GROUPED.as_json()
    change(entry)
    with pytest.raises(Unsupported):
        OP.check(Definition.model_validate(entry))
