"""Laws of recurrences: linear in values and state, time that can be cut, heads and slots that can be moved."""

from __future__ import annotations

from typing import Any

import torch

from traceproof.calibrate.model import Subject
from traceproof.metamorphic.batch import Prefilled
from traceproof.metamorphic.common import BATCH, other_inputs, times, unchanged
from traceproof.metamorphic.model import Experiment, Law, Outputs, permutation
from traceproof.metamorphic.rows import scaled
from traceproof.ops.base import Tensors, Values


def _state(subject: Subject) -> tuple[str, str]:
    """Names of the states, before and after."""
    before = "initial_state" if "initial_state" in subject.inputs else "state"
    return before, next(name for name in subject.definition.outputs if name.endswith("_state"))


def _doubled(subject: Subject) -> Experiment:
    """Values and state doubled: everything doubles."""
    source = "v" if "v" in subject.inputs else "x"
    names = [name for name in (source, _state(subject)[0]) if isinstance(subject.inputs.get(name), torch.Tensor)]
    changes = {name: subject.tensor(name) * 2 for name in names}
    return other_inputs(subject.with_inputs(**changes), times(0.5, *subject.definition.outputs), unchanged)


def _superposed(subject: Subject) -> Experiment | None:
    """The answer to values without a state plus that to a state without values."""
    source, (before, _) = ("v" if "v" in subject.inputs else "x"), _state(subject)
    if not isinstance(subject.inputs[before], torch.Tensor):
        return None
    calls = tuple(
        subject.with_inputs(**{name: torch.zeros_like(subject.tensor(name))}) for name in (before, source)
    )

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        total = {
            name: (outputs[1][name].double() + outputs[2][name].double()).to(value.dtype)
            for name, value in outputs[0].items()
        }
        return total, dict(outputs[0])

    return Experiment(calls, sides)


def _gdn_heads(subject: Subject) -> Experiment | None:
    """Query and key heads with their groups of value heads."""
    heads, values = subject.tensor("q").shape[-2], subject.tensor("v").shape[-2]
    if values < 2:
        return None
    before, after = _state(subject)
    outer, inner = permutation(subject, heads), permutation(subject, values // heads)
    order = (outer[:, None] * (values // heads) + inner).flatten()
    axes = {"q": (-2, outer), "k": (-2, outer), "v": (-2, order), before: (1, order)}
    axes |= dict.fromkeys(("a", "b", "A_log", "dt_bias"), (-1, order))
    changes = {
        name: subject.tensor(name).index_select(axis, index)
        for name, (axis, index) in axes.items()
        if isinstance(subject.inputs[name], torch.Tensor)
    }
    return other_inputs(
        subject.with_inputs(**changes),
        unchanged,
        lambda outputs: {
            name: value.index_select(1 if name == after else -2, order) for name, value in outputs.items()
        },
    )


def _cut_in_time(subject: Subject) -> Experiment | None:
    """Each sequence in two calls, the second from the state that the first leaves."""
    if "cu_seqlens" not in subject.inputs:
        return None
    bounds = Prefilled(subject.definition, subject.inputs).bounds
    if not any(stop - start > 1 for start, stop in bounds):
        return None
    middles = [start + (stop - start + 1) // 2 for start, stop in bounds]
    first = [(start, middle) for (start, _), middle in zip(bounds, middles, strict=True)]
    second = [(middle, stop) for (_, stop), middle in zip(bounds, middles, strict=True)]
    tokens_axis = (subject.definition.inputs["q"].shape or ("",))[0]

    def part(ranges: list[tuple[int, int]], state: Any) -> Values:  # noqa: ANN401 - a tensor or None
        rows = torch.cat([torch.arange(start, stop) for start, stop in ranges])
        changes: Values = {
            name: subject.tensor(name)[rows]
            for name, spec in subject.definition.inputs.items()
            if (spec.shape or ("",))[0] == tokens_axis
        }
        lengths = torch.tensor([0, *(stop - start for start, stop in ranges)])
        changes["cu_seqlens"] = lengths.cumsum(0).to(subject.tensor("cu_seqlens").dtype)
        return {**subject.inputs, **changes, "state": state}

    def rest(outputs: Outputs) -> Values:
        return part(second, outputs[1]["new_state"].float())

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        joined = torch.empty_like(outputs[0]["output"])
        for ranges, found in zip((first, second), outputs[1:], strict=True):
            joined[torch.cat([torch.arange(start, stop) for start, stop in ranges])] = found["output"]
        return {"output": joined, "new_state": outputs[2]["new_state"]}, dict(outputs[0])

    return Experiment((part(first, subject.inputs["state"]), rest), sides)


def _slots(subject: Subject) -> Experiment | None:
    """The pool's slots moved, the indices with them."""
    before, after = _state(subject)
    index = next((name for name in ("initial_state_indices", "state_batch_indices") if name in subject.inputs), "")
    if not index or len(subject.tensor(before)) < 2:
        return None
    order = permutation(subject, len(subject.tensor(before)))
    back, old = torch.argsort(order), subject.tensor(index)
    moved = torch.where(old < 0, old, order[old.clamp_min(0).long()].to(old.dtype))
    values = subject.with_inputs(**{before: subject.tensor(before)[back], index: moved})
    return other_inputs(
        values, unchanged, lambda outputs: {n: v[back] if n == after else v for n, v in outputs.items()}
    )


def _mamba_groups(subject: Subject) -> Experiment | None:
    """Groups of B and C with the heads that read them."""
    groups, heads = subject.tensor("B").shape[1], subject.tensor("x").shape[1]
    if heads < 2:
        return None
    outer, inner = permutation(subject, groups), permutation(subject, heads // groups)
    order = (outer[:, None] * (heads // groups) + inner).flatten()
    changes = {name: subject.tensor(name)[:, outer] for name in ("B", "C")}
    changes |= {name: subject.tensor(name)[:, order] for name in ("state", "x", "dt")}
    changes |= {name: subject.tensor(name)[order] for name in ("A", "D", "dt_bias")}
    return other_inputs(
        subject.with_inputs(**changes),
        unchanged,
        lambda outputs: {name: value[:, order] for name, value in outputs.items()},
    )


LINEAR = (
    Law("values and state doubled", _doubled, exact=True),
    Law("values and state superposed", _superposed),
    Law("slots of the pool permuted", _slots, exact=True),
)
GDN = (
    *BATCH,
    *LINEAR,
    Law("q doubled", scaled("q", output=times(0.5, "output")), exact=True),
    Law("heads permuted", _gdn_heads),
    Law("cut in time, state handed on", _cut_in_time),
)
MAMBA = (
    *BATCH,
    *LINEAR,
    Law("C and D doubled", scaled("C", "D", output=times(0.5, "output")), exact=True),
    Law("groups and heads permuted", _mamba_groups),
)
