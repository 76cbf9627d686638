"""The relations of op_types whose references are long; of all others, those of a batch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from relations.attention import PAGED, SPARSE
from relations.building import (
    BATCH,
    Experiment,
    Outputs,
    Relation,
    added,
    columns,
    halved_all,
    negated,
    other_inputs,
    permutation,
    permuted,
    reordered,
    scaled,
    times,
)
from traceproof.dataset.definition import Definition
from traceproof.ops.base import Tensors, Values, taken
from traceproof.ops.batch import batch_of
from traceproof.ops.families.expert import OF_EXPERTS
from traceproof.ops.families.routing import PACKED_SHIFT, Method, routing_of
from traceproof.ops.gates import state_names
from traceproof.ops.op import Subject

# Matrix products


def _doubled_a(subject: Subject) -> Experiment | None:
    if "tiny" in subject.case.params.get("rows", ()):
        return None  # products below float16's normal numbers round more coarsely than their doubles
    return other_inputs(subject.with_inputs(A=2 * subject.tensor("A")), right=times(2, "C"))


def _k_split(subject: Subject) -> Experiment:
    """The first half of K with the rest zero, and the other way round, add up."""
    a = subject.tensor("A")
    first = torch.arange(a.shape[1]) < a.shape[1] // 2
    halves = (a.masked_fill(~first, 0), a.masked_fill(first, 0))
    return Experiment(tuple(subject.with_inputs(A=half) for half in halves), added)


GEMM = (
    *BATCH,
    Relation("A doubled", _doubled_a, exact=True),
    Relation("K permuted", lambda one: permuted(dict.fromkeys(one.definition.inputs, 1))(one)),
    Relation("rows of B permuted", permuted({"B": 0}, 1)),
    Relation("K split and added", _k_split),
)


# Norms

LARGE = 64.0  # of norm 1 data: beside its mean square no eps in use is seen in float32


def _norm_scale(subject: Subject) -> Experiment:
    """The norm of x and of 2 x, both far from eps."""
    names = [name for name in ("hidden_states", "residual") if name in subject.inputs]
    large = {name: subject.tensor(name) * LARGE for name in names}
    larger = {name: 2 * value for name, value in large.items()}
    calls = subject.with_inputs(**large), subject.with_inputs(**larger)

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        return dict(outputs[2]), times(2, "residual_out")(outputs[1])

    return Experiment(calls, sides)


def _residual_exchanged(subject: Subject) -> Experiment | None:
    if "residual" not in subject.inputs:
        return None
    one, other = subject.tensor("hidden_states"), subject.tensor("residual")
    return other_inputs(subject.with_inputs(hidden_states=other, residual=one))


# Of those forms alone that do no more than a norm, and call their inputs so.
NORM = (
    Relation("x doubled, far from eps", _norm_scale),
    Relation("weight doubled", scaled("weight", output=times(0.5, "output")), exact=True),
    Relation("sign of x", negated("hidden_states", "residual"), exact=True),
    Relation("columns permuted", columns),
    Relation("hidden states and residual exchanged", _residual_exchanged, exact=True),
)
RMSNORM = (*BATCH, *(replace(one, holds=lambda told: {"eps", "scale"}.isdisjoint(told.inputs)) for one in NORM))


# Rotary embeddings


def _rope_heads(subject: Subject) -> Experiment | None:
    """Heads of q and of k, where they are told apart."""
    if subject.tensor("q").dim() != 3:
        return None
    orders = {name: permutation(subject, subject.tensor(name).shape[1]) for name in ("q", "k")}
    values = subject.with_inputs(**{name: subject.tensor(name)[:, order] for name, order in orders.items()})
    outs = dict(zip(subject.definition.outputs, orders.values(), strict=True))
    return other_inputs(
        values, right=lambda outputs: {name: value[:, outs[name]] for name, value in outputs.items()}
    )


def _rope_sum(subject: Subject) -> Experiment:
    """A rotation is linear: q with every other channel zero, and the rest, add up."""
    even = torch.arange(subject.tensor("q").shape[-1]) % 2 == 0
    parts = [
        subject.with_inputs(**{name: subject.tensor(name).masked_fill(mask, 0) for name in ("q", "k")})
        for mask in (even, ~even)
    ]
    return Experiment(tuple(parts), added)


ROPE = (
    *BATCH,
    Relation("q and k doubled", scaled("q", "k", output=halved_all), exact=True),
    Relation("heads permuted", _rope_heads, exact=True),
    Relation("channels split and added", _rope_sum),
)


# Recurrences: linear in values and state, slots and heads that can be moved, time that can be cut


def _recurrence_doubled(subject: Subject) -> Experiment:
    """Values and state doubled: everything doubles."""
    source = "v" if "v" in subject.inputs else "x"
    names = (source, state_names(subject.inputs, subject.definition)[0])
    given = [name for name in names if isinstance(subject.inputs.get(name), torch.Tensor)]
    return other_inputs(subject.with_inputs(**{name: subject.tensor(name) * 2 for name in given}), halved_all)


def _superposed(subject: Subject) -> Experiment | None:
    """The answer to values without a state plus that to a state without values."""
    source, (before, _) = ("v" if "v" in subject.inputs else "x"), state_names(subject.inputs, subject.definition)
    if not isinstance(subject.inputs[before], torch.Tensor):
        return None
    calls = tuple(
        subject.with_inputs(**{name: torch.zeros_like(subject.tensor(name))}) for name in (before, source)
    )
    return Experiment(calls, added)


def _slots(subject: Subject) -> Experiment | None:
    """The pool's slots moved, the indices with them."""
    before, after = state_names(subject.inputs, subject.definition)
    index = next((name for name in ("initial_state_indices", "state_batch_indices") if name in subject.inputs), "")
    if not index or len(subject.tensor(before)) < 2:
        return None
    order = permutation(subject, len(subject.tensor(before)))
    back, old = torch.argsort(order), subject.tensor(index)
    moved = torch.where(old < 0, old, order[old.clamp_min(0).long()].to(old.dtype))
    values = subject.with_inputs(**{before: subject.tensor(before)[back], index: moved})
    return other_inputs(
        values, right=lambda outputs: {n: v[back] if n == after else v for n, v in outputs.items()}
    )


LINEAR = (
    Relation("values and state doubled", _recurrence_doubled, exact=True),
    Relation("values and state superposed", _superposed),
    Relation("slots of the pool permuted", _slots, exact=True),
)


def _gdn_heads(subject: Subject) -> Experiment | None:
    """Query and key heads with their groups of value heads."""
    heads, values = subject.tensor("q").shape[-2], subject.tensor("v").shape[-2]
    if values < 2:
        return None
    before, after = state_names(subject.inputs, subject.definition)
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
    batch = batch_of(subject)
    if batch is None or "cu_seqlens" not in subject.inputs:
        return None
    bounds = batch.bounds("cu_seqlens")
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


GDN = (
    *BATCH,
    *LINEAR,
    Relation("q doubled", scaled("q", output=times(0.5, "output")), exact=True),
    Relation("heads permuted", _gdn_heads),
    Relation("cut in time, state handed on", _cut_in_time),
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
    return other_inputs(subject.with_inputs(**changes), right=reordered(order, 1))


MAMBA_SSU = (
    *BATCH,
    *LINEAR,
    Relation("C and D doubled", scaled("C", "D", output=times(0.5, "output")), exact=True),
    Relation("groups and heads permuted", _mamba_groups),
)


# Experts

DOWN = ("output2_scales_scalar", "gemm2_weights_scale", "gemm2_weights")  # the first of them scales the result


def _expert_order(subject: Subject) -> Experiment:
    """Local experts moved within their groups, routing with them. All experts' columns: those elsewhere stay."""
    routing = routing_of(subject.definition)
    offset = int(subject.inputs.get("local_expert_offset") or 0)
    size = routing.experts // routing.groups
    order = torch.arange(routing.experts)  # place i now holds expert order[i]
    for start in range(0, routing.experts, size):
        low, high = max(start, offset), min(start + size, offset + routing.local)
        if high > low:
            order[low:high] = low + permutation(subject, high - low)
    local = order[offset : offset + routing.local] - offset
    changes = {name: taken(subject.tensor(name), 0, local) for name in OF_EXPERTS if name in subject.inputs}
    if routing.by_input:
        changes["topk_ids"] = _renamed(subject.tensor("topk_ids"), torch.argsort(order), routing.method)
    else:
        changes["routing_logits"] = subject.tensor("routing_logits")[:, order]
        if "routing_bias" in subject.inputs:
            changes["routing_bias"] = subject.tensor("routing_bias")[order]
    return other_inputs(subject.with_inputs(**changes))


def _renamed(ids: torch.Tensor, names: torch.Tensor, method: Method) -> torch.Tensor:
    if method == Method.PACKED:
        return (names[(ids >> PACKED_SHIFT).long()].to(ids.dtype) << PACKED_SHIFT) | (ids & 0xFFFF)
    return names[ids.long()].to(ids.dtype)


def _down(subject: Subject) -> list[str]:
    """What scales an expert's result, and what is added to it."""
    return [next(name for name in DOWN if name in subject.inputs), *subject.inputs.keys() & {"gemm2_bias"}]


def _factor_doubled(subject: Subject) -> Experiment | None:
    factor = subject.inputs.get("routed_scaling_factor")
    if not isinstance(factor, int | float):
        return None
    return other_inputs(subject.with_inputs(routed_scaling_factor=factor * 2), times(0.5, "output"))


def _experts_split(subject: Subject) -> Experiment | None:
    """Half of the experts give nothing, then the other half: the two add up, as shards of experts do."""
    tensors = {name: subject.tensor(name) for name in _down(subject)}
    count = len(next(iter(tensors.values())))
    first = torch.arange(count) < count // 2
    calls = tuple(
        subject.with_inputs(
            **{
                name: torch.where(mask.view(-1, *(1,) * (one.dim() - 1)), one, torch.zeros_like(one))
                for name, one in tensors.items()
            }
        )
        for mask in (first, ~first)
    )
    return Experiment(calls, added) if count > 1 else None


MOE = (
    *BATCH,
    Relation("experts permuted", _expert_order),
    Relation("down projection doubled", lambda one: scaled(*_down(one), output=halved_all)(one), exact=True),
    Relation("scaling factor doubled", _factor_doubled, exact=True),
    Relation("experts split and added", _experts_split),
)


# Samplers

ROWS = ("probs", "top_k", "top_p")
LEAST_P = 1e-6  # top-p that leaves the most probable token alone


def _prefix(subject: Subject) -> Experiment | None:
    """The first row alone, from the same seed, draws the same token."""
    if len(subject.tensor("probs")) < 2:
        return None
    values = subject.with_inputs(**{name: subject.tensor(name)[:1] for name in ROWS if name in subject.inputs})
    return other_inputs(values, right=lambda outputs: {"samples": outputs["samples"][..., :1]})


def _greedy(subject: Subject) -> Experiment | None:
    """One token left: its probability is the largest of its row."""
    probs = subject.tensor("probs")
    if not len(probs):
        return None
    changes = {}
    if "top_k" in subject.inputs:
        changes["top_k"] = torch.ones_like(subject.tensor("top_k"))
    else:
        changes["top_p"] = torch.full_like(subject.tensor("top_p"), LEAST_P)
    best = probs.amax(-1)

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        drawn = outputs[1]["samples"]
        found = probs.gather(1, drawn.reshape(-1, len(probs)).T.long()).T.reshape(drawn.shape)
        return {"samples": found}, {"samples": best.expand_as(found).clone()}

    return Experiment((subject.with_inputs(**changes),), sides)


def _wide_k(subject: Subject) -> Experiment | None:
    """A k of the whole vocabulary and one beyond it filter nothing."""
    if "top_k" not in subject.inputs or not len(subject.tensor("probs")):
        return None
    k, vocabulary = subject.tensor("top_k"), subject.tensor("probs").shape[1]
    calls = tuple(subject.with_inputs(top_k=torch.full_like(k, vocabulary + more)) for more in (0, 100))
    return Experiment(calls, lambda outputs: (dict(outputs[1]), dict(outputs[2])))


SAMPLING = (
    Relation("first row alone, same seed", _prefix, exact=True, once=True),
    Relation("rows permuted", permuted(dict.fromkeys(ROWS, 0), -1)),
    Relation("one token left", _greedy, exact=True, once=True),
    Relation("k of the vocabulary and beyond", _wide_k, exact=True, once=True),
)


RELATIONS: Mapping[str, tuple[Relation, ...]] = {
    "dsa_paged": SPARSE,
    "gdn": GDN,
    "gemm": GEMM,
    **dict.fromkeys(("gqa_paged", "gqa_ragged", "mla_paged", "mla_ragged"), PAGED),
    "mamba_ssu": MAMBA_SSU,
    "moe": MOE,
    "rmsnorm": RMSNORM,
    "rope": ROPE,
    "sampling": SAMPLING,
}


def relations_of(definition: Definition) -> tuple[Relation, ...]:
    """The relations of a definition, those of a batch where none are named; some may say nothing of any case."""
    return tuple(one for one in RELATIONS.get(definition.op_type, BATCH) if one.holds(definition))
