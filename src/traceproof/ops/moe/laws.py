"""Laws of mixtures of experts."""

import torch

from traceproof.ops.common.laws import BATCH, added, other_inputs, times
from traceproof.ops.laws import Experiment, Law, Subject, permutation, taken
from traceproof.ops.moe.form import form_of
from traceproof.ops.moe.routing import PACKED_SHIFT, Method

OF_EXPERTS = (  # inputs whose first axis is the local experts
    *("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale"),
    *("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"),
)
DOWN = (
    "output2_scales_scalar",
    "gemm2_weights_scale",
    "gemm2_weights",
)  # the first that is there scales the result


def _expert_order(subject: Subject) -> Experiment:
    """Local experts moved within their groups, routing with them. All experts' columns: those elsewhere stay."""
    form = form_of(subject.definition)
    offset = int(subject.inputs.get("local_expert_offset") or 0)
    size = form.experts // form.routing.groups
    order = torch.arange(form.experts)  # place i now holds expert order[i]
    for start in range(0, form.experts, size):
        low, high = max(start, offset), min(start + size, offset + form.local)
        if high > low:
            order[low:high] = low + permutation(subject, high - low)
    local = order[offset : offset + form.local] - offset
    changes = {name: taken(subject.tensor(name), 0, local) for name in OF_EXPERTS if name in subject.inputs}
    if form.routing.given:
        changes["topk_ids"] = _renamed(subject.tensor("topk_ids"), torch.argsort(order), form.routing.method)
    else:
        changes["routing_logits"] = subject.tensor("routing_logits")[:, order]
        if "routing_bias" in subject.inputs:
            changes["routing_bias"] = subject.tensor("routing_bias")[order]
    return other_inputs(subject.with_inputs(**changes))


def _renamed(ids: torch.Tensor, names: torch.Tensor, method: Method) -> torch.Tensor:
    if method == Method.PACKED:
        return (names[(ids >> PACKED_SHIFT).long()].to(ids.dtype) << PACKED_SHIFT) | (ids & 0xFFFF)
    return names[ids.long()].to(ids.dtype)


def _down_doubled(subject: Subject) -> Experiment:
    name = next(name for name in DOWN if name in subject.inputs)
    values = subject.with_inputs(**{name: subject.tensor(name) * 2})
    return other_inputs(values, times(0.5, "output"))


def _factor_doubled(subject: Subject) -> Experiment | None:
    factor = subject.inputs.get("routed_scaling_factor")
    if not isinstance(factor, int | float):
        return None
    values = subject.with_inputs(routed_scaling_factor=factor * 2)
    return other_inputs(values, times(0.5, "output"))


def _experts_split(subject: Subject) -> Experiment | None:
    """Half of the experts give nothing, then the other half: the two add up, as shards of experts do."""
    name = next(name for name in DOWN if name in subject.inputs)
    scale = subject.tensor(name)
    if len(scale) < 2:
        return None
    first = (torch.arange(len(scale)) < len(scale) // 2).view(-1, *(1,) * (scale.dim() - 1))
    calls = tuple(
        subject.with_inputs(**{name: torch.where(mask, scale, torch.zeros_like(scale))})
        for mask in (first, ~first)
    )
    return Experiment(calls, added)


LAWS = (
    *BATCH,
    Law("experts permuted", _expert_order),
    Law("down projection doubled", _down_doubled, exact=True),
    Law("scaling factor doubled", _factor_doubled, exact=True),
    Law("experts split and added", _experts_split),
)
