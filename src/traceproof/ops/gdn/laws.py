"""Laws of the gated delta rule: heads that can be moved, time that can be cut."""

from typing import Any

import torch

from traceproof.ops.common.batch import Prefilled
from traceproof.ops.common.laws import BATCH, other_inputs, scaled, times
from traceproof.ops.common.recurrent_bugs import state_names
from traceproof.ops.common.recurrent_laws import LINEAR
from traceproof.ops.laws import Experiment, Law, Outputs, Subject, Tensors, Values, permutation


def _gdn_heads(subject: Subject) -> Experiment | None:
    """Query and key heads with their groups of value heads."""
    heads, values = subject.tensor("q").shape[-2], subject.tensor("v").shape[-2]
    if values < 2:
        return None
    before, after = state_names(subject)
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
        right=lambda outputs: {
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


LAWS = (
    *BATCH,
    *LINEAR,
    Law("q doubled", scaled("q", output=times(0.5, "output")), exact=True),
    Law("heads permuted", _gdn_heads),
    Law("cut in time, state handed on", _cut_in_time),
)
