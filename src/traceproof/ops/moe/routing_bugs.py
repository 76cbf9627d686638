"""Where tokens go and with what weight: once more in float32, and in the ways that bugs have it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from traceproof.ops.base import Values, tensor
from traceproof.ops.moe.experts import chosen
from traceproof.ops.moe.form import Form
from traceproof.ops.moe.routing import Choice, Method

Change = Callable[[Form, Values], Choice | None]
OUT = -50.0  # a logit whose sigmoid is nothing beside any other's


def in_float32(form: Form, inputs: Values) -> Choice | None:
    """The choice as a kernel makes it, in float32; None where it is given."""
    if form.routing.given:
        return None
    logits, k = _logits(inputs), form.routing.top_k
    match form.routing.method:
        case Method.DEEPSEEK:
            scores = torch.sigmoid(logits)
            biased = _in_groups(form, scores + _bias(inputs), best=2)
            experts = biased.topk(k, -1).indices
            weights = scores.gather(-1, experts)
            weights = weights / weights.sum(-1, keepdim=True) * _factor(inputs)
        case Method.RENORMALISE:
            weights, experts = torch.softmax(logits, -1).topk(k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
        case _:
            top, experts = logits.topk(k, -1)
            weights = torch.sigmoid(top)
    return Choice(experts, weights)


def _logits(inputs: Values) -> torch.Tensor:
    return tensor(inputs, "routing_logits").float()


def _bias(inputs: Values) -> torch.Tensor:
    return tensor(inputs, "routing_bias").float()


def _factor(inputs: Values) -> float:
    return float(inputs.get("routed_scaling_factor") or 1.0)


def _in_groups(form: Form, scores: torch.Tensor, *, best: int) -> torch.Tensor:
    """Scores with -inf for experts outside the kept groups; a group counts its `best` best."""
    groups = form.routing.groups
    grouped = scores.view(len(scores), groups, form.experts // groups)
    kept = grouped.topk(best, -1).values.sum(-1).topk(form.routing.top_groups, -1).indices
    out = torch.ones(len(scores), groups, dtype=torch.bool).scatter(-1, kept, value=False)
    return grouped.masked_fill(out[..., None], -torch.inf).view(scores.shape)


def _reformed(**numbers: Callable[[int], int]) -> Change:
    """Routing with other numbers of groups or of experts; None where these are none."""

    def change(form: Form, inputs: Values) -> Choice | None:
        changed = form.routing
        for name, alter in numbers.items():
            value: Any = alter(getattr(form.routing, name))
            changed = replace(changed, **{name: value})
        grouped = not numbers.keys().isdisjoint({"groups", "top_groups"})
        room = form.experts // changed.groups * changed.top_groups
        if form.routing.given or (grouped and form.routing.groups == 1):
            return None
        if not (0 < changed.top_groups <= changed.groups and 0 < changed.top_k <= room):
            return None
        return chosen(replace(form, routing=changed), inputs)

    return change


def _no_bias(form: Form, inputs: Values) -> Choice | None:
    if form.routing.method != Method.DEEPSEEK:
        return None
    return chosen(form, {**inputs, "routing_bias": torch.zeros_like(_bias(inputs))})


def _bias_in_weights(form: Form, inputs: Values) -> Choice | None:
    if form.routing.method != Method.DEEPSEEK:
        return None
    choice = chosen(form, inputs)
    biased = (torch.sigmoid(_logits(inputs)) + _bias(inputs)).gather(-1, choice.experts)
    return Choice(choice.experts, biased / biased.sum(-1, keepdim=True) * _factor(inputs))


def _not_renormalised(form: Form, inputs: Values) -> Choice | None:
    if form.routing.method not in {Method.DEEPSEEK, Method.RENORMALISE}:
        return None
    choice, logits = chosen(form, inputs), _logits(inputs)
    deepseek = form.routing.method == Method.DEEPSEEK
    scores = torch.sigmoid(logits) * _factor(inputs) if deepseek else torch.softmax(logits, -1)
    return Choice(choice.experts, scores.gather(-1, choice.experts))


def _other_scores(form: Form, inputs: Values) -> Choice | None:
    """Softmax of the chosen where sigmoid is meant, and the other way round."""
    if form.routing.given:
        return None
    choice = chosen(form, inputs)
    logits = _logits(inputs).gather(-1, choice.experts)
    if form.routing.method == Method.DEEPSEEK:
        return Choice(choice.experts, torch.softmax(logits, -1) * _factor(inputs))
    if form.routing.method == Method.LLAMA4:
        return Choice(choice.experts, torch.ones_like(choice.weights))
    scores = torch.sigmoid(logits)
    return Choice(choice.experts, scores / scores.sum(-1, keepdim=True))


def _group_of_the_best_one(form: Form, inputs: Values) -> Choice | None:
    """A group counts its best expert instead of its two best."""
    if form.routing.groups == 1:
        return None
    kept = _in_groups(form, torch.sigmoid(_logits(inputs)) + _bias(inputs), best=1)
    return chosen(form, {**inputs, "routing_logits": _logits(inputs).masked_fill(torch.isinf(kept), OUT)})


def _next_best(form: Form, inputs: Values) -> Choice | None:
    """The k-th expert replaced by the one after it."""
    right = chosen(form, inputs)
    more = _reformed(top_k=lambda k: k + 1)(form, inputs)
    if more is None:
        return None
    experts, weights = (torch.cat([part[:, :-2], part[:, -1:]], -1) for part in (more.experts, more.weights))
    if form.routing.top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True) * right.weights.sum(-1, keepdim=True)
    return Choice(experts, weights)


def _last_dropped(form: Form, inputs: Values) -> Choice | None:
    choice = chosen(form, inputs)
    return Choice(choice.experts[:, :-1], choice.weights[:, :-1]) if form.routing.top_k > 1 else None


def _one_expert_idle(form: Form, inputs: Values) -> Choice:
    """One of the local experts does nothing: the one that most tokens go to."""
    choice = chosen(form, inputs)
    local = choice.experts - int(inputs.get("local_expert_offset") or 0)
    here = local[(local >= 0) & (local < form.local)]
    if not len(here):
        return choice
    return Choice(choice.experts, choice.weights.masked_fill(local == here.mode().values, 0.0))


def _alike(form: Form, inputs: Values) -> Choice | None:
    if form.routing.top_k == 1:
        return None
    choice = chosen(form, inputs)
    return Choice(choice.experts, choice.weights.mean(-1, keepdim=True).expand_as(choice.weights))


def _ids_permuted(form: Form, inputs: Values) -> Choice | None:
    """Weights of a token's experts in another order than the experts."""
    choice = chosen(form, inputs)
    return Choice(choice.experts, choice.weights.flip(-1)) if form.routing.top_k > 1 else None


WRONG: Mapping[str, Change] = {
    "routing bias dropped": _no_bias,
    "routing bias kept in the weights": _bias_in_weights,
    "renormalisation dropped": _not_renormalised,
    "another score than the method's": _other_scores,
    "group limit ignored": _reformed(groups=lambda _: 1, top_groups=lambda _: 1),
    "one group too few": _reformed(top_groups=lambda count: count - 1),
    "one group too many": _reformed(top_groups=lambda count: count + 1),
    "a group counts its best expert": _group_of_the_best_one,
    "one expert too few": _reformed(top_k=lambda k: k - 1),
    "one expert too many": _reformed(top_k=lambda k: k + 1),
    "k-th expert replaced by the next": _next_best,
    "last expert dropped": _last_dropped,
    "one local expert idle": _one_expert_idle,
    "experts weigh alike": _alike,
    "weights in another order": _ids_permuted,
}
