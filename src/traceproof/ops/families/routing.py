"""How tokens choose experts: the routing of mixtures of experts, and the router alone.

Ties go to the lowest expert index.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from traceproof.dataset.constants import Rule
from traceproof.lazy import torch
from traceproof.models.drafts import Extraction, Facts, call_of, compared_with, draft, dtype_name
from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading
from traceproof.ops.adapter import SM80, SM89, Api, Definition, Given, Outputs, dim, dtype_of
from traceproof.ops.base import Tensors, Unsupported, rounded
from traceproof.ops.cases import OTHER_SCALARS, SEEN, UNUSUAL
from traceproof.ops.compare import Entries, Exact
from traceproof.ops.families.blockscaled import below, ones
from traceproof.ops.formula import NOTHING, Form, Mutant, Part, Wanted, Wide, altered, has, same
from traceproof.ops.gates import softplus
from traceproof.ops.lossless import SURE
from traceproof.ops.op import ADVERSARIAL, Op

if TYPE_CHECKING:
    from traceproof.dataset.definition import TensorSpec
    from traceproof.draw import Draw

FEW = 2  # top_k where a definition leaves it open
PACKED_SHIFT = 16  # of topk_ids: expert << 16 | bits of the bfloat16 weight


class Method(StrEnum):
    """How a token's experts are chosen, and how their weights are computed.

    DEEPSEEK: sigmoid; choose by sigmoid + bias, groups first (a group counts the sum of its two best); weights
        are the chosen sigmoids without bias, normalised, times the scaling factor.
    RENORMALISE: choose the largest logits, softmax over the chosen. The same as softmax, choose, renormalise.
    LLAMA4: the largest logit alone, weight sigmoid(logit); a routing bias is not read.
    DEFAULT: choose the largest logits; weights are the softmax over all.
    EVEN: choose the largest logits; every one weighs 1 / top_k.
    PACKED: the choice is an input: FlashInfer's packing of expert and weight in one int32.
    UNIFORM: the choice is an input of plain expert indices; every one weighs 1 / top_k, times the scaling factor.
    WEIGHTED: expert indices and weights are inputs.
    PLANNED: inputs are blocks of places (token x top_k + slot), the expert of each block, and weights by slot.

    If the method is stated or an input, a routing bias is added to the logits; DEEPSEEK adds it to the sigmoids.
    """

    DEEPSEEK = "deepseek"
    RENORMALISE = "renormalise"
    LLAMA4 = "llama4"
    DEFAULT = "default"
    EVEN = "even"
    PACKED = "packed"
    UNIFORM = "uniform"
    WEIGHTED = "weighted"
    PLANNED = "planned"


# Other names of experts' inputs in FlashInfer's functions.
SYNONYMS = {
    "hidden_states": "x input activations_in",
    "hidden_states_scale": "x_sf",
    "gemm1_weights": "w1_weight fc1_expert_weights expert_weights_up gemm1_weights_0",
    "gemm1_weights_scale": "w1_weight_sf expert_scales_up gemm1_weights_scale_0",
    "gemm2_weights": "w2_weight fc2_expert_weights expert_weights_down gemm2_weights_0",
    "gemm2_weights_scale": "w2_weight_sf expert_scales_down gemm2_weights_scale_0",
    "routing_logits": "router_logits",
    "topk_ids": "token_selected_experts",
    "topk_weights": "token_final_scales expert_weights",
    "output1_scales_scalar": "output1_scale_scalar w1_alpha",
    "output1_scales_gate_scalar": "output1_scale_gate_scalar",
    "output2_scales_scalar": "output2_scale_scalar w2_alpha",
}
ROLES = {name: own for own, names in SYNONYMS.items() for name in names.split()}


def named(definition: Definition) -> dict[str, TensorSpec]:
    """A definition's inputs under the keys of SYNONYMS, if they have one of the names there."""
    return {ROLES.get(name, name): spec for name, spec in definition.inputs.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A routing method with its numbers of experts and groups; one group means no grouping."""

    method: Method
    top_k: int
    experts: int
    local: int  # experts on this rank; the others add nothing to its output
    groups: int = 1
    top_groups: int = 1
    shared: int = 0  # experts after the local ones, to which every token goes with weight 1
    biased: bool = False  # whether a bias is added to the logits

    @property
    def by_input(self) -> bool:
        """Whether the choice of experts is an input."""
        return self.method in {Method.PACKED, Method.UNIFORM, Method.WEIGHTED, Method.PLANNED}

    @property
    def misfit(self) -> str | None:
        """Why no token can be routed with these numbers; None if it can."""
        per_group, rest = divmod(self.experts, self.groups)
        if rest or not 0 < self.top_groups <= self.groups:
            return f"{self.experts} experts in {self.groups} groups, {self.top_groups} of them kept"
        if self.groups > 1 and per_group < 2:
            return "a group needs two experts"  # it counts its two best
        room = per_group * self.top_groups
        return None if 0 < self.top_k <= room else f"top_k {self.top_k} of {room} experts"


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """Expert indices int64 [..., top_k] and weights [..., top_k] in the precision of the formula."""

    experts: torch.Tensor
    weights: torch.Tensor


def routing_of(definition: Definition) -> Routing:
    """Routing of a mixture, by its inputs and constants; raises Unsupported if it is of no known kind."""
    inputs, const = named(definition), definition.const_axes
    shapes = {name: spec.shape or () for name, spec in inputs.items()}
    shared = const.get("num_fused_shared_experts", 0) if "num_fused_shared_experts" in inputs else 0
    local = const.get(shapes["gemm1_weights"][0], -1) - shared
    held: dict[str, Any] = {"local": local, "shared": shared}
    if "sorted_token_ids" in inputs:
        top_k = const.get(shapes["topk_weights"][1], -1)
        routing = Routing(method=Method.PLANNED, top_k=top_k, experts=local, **held)
    elif "topk_ids" in inputs and not ("routing_logits" in inputs and inputs["topk_ids"].optional):
        if "routing_logits" in inputs and not inputs["routing_logits"].optional:
            raise Unsupported("both routing_logits and topk_ids choose experts")
        packed = definition.constants.get("topk_ids") == "packed"
        method = Method.WEIGHTED if "topk_weights" in inputs else Method.PACKED if packed else Method.UNIFORM
        top_k, experts = const.get(shapes["topk_ids"][1], FEW), const.get("num_experts", local)
        routing = Routing(method=method, top_k=top_k, experts=experts, **held)
    elif "routing_logits" in inputs:
        routing = Routing(**_by_logits(definition, inputs), **held)
    else:
        raise Unsupported("inputs lack ['routing_logits'], or ['topk_ids']")
    if routing.misfit is not None:
        raise Unsupported(routing.misfit)
    return routing


def _by_logits(definition: Definition, inputs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Method and sizes of a choice by logits, as `Routing` takes them. Raises Unsupported if one is lacking."""
    constants = (definition.constants.get(name) for name in ("top_k", "n_group", "topk_group"))
    top_k, groups, top_groups = (value if isinstance(value, int) else None for value in constants)
    if top_k is None:
        raise Unsupported("nobody gives top_k a number, nor does the reference")
    stated_method = definition.constants.get("routing_method")
    is_stated = stated_method is not None or "routing_method_type" in inputs
    method = _method(inputs, stated_method, top_k)
    experts = definition.const_axes.get((inputs["routing_logits"].shape or ())[1], -1)
    found: dict[str, Any] = {"method": method, "top_k": top_k, "experts": experts, "biased": False}
    if method is Method.DEEPSEEK:
        if (groups is None) != (top_groups is None):
            raise Unsupported("of n_group and topk_group only one is given")
        return found | {"groups": groups or 1, "top_groups": top_groups or 1}
    if is_stated:
        found["biased"] = "routing_bias" in inputs
        if method is Method.LLAMA4:
            found["top_k"] = 1
    return found


def _method(inputs: Mapping[str, TensorSpec], stated: object, top_k: int) -> Method:
    """Method of routing by logits: the stated one, DEFAULT if it is an input, else the one that inputs imply."""
    if stated is not None or "routing_method_type" in inputs:
        return Method.DEFAULT if stated is None else Method(str(stated))
    if {"routing_bias", "routed_scaling_factor"} <= inputs.keys():
        return Method.DEEPSEEK
    if top_k == 1 and ("routing_bias" in inputs or "output1_scales_scalar" in inputs):
        return Method.LLAMA4
    if "routing_bias" in inputs:
        raise Unsupported("a routing_bias without routed_scaling_factor is known for top_k 1 only")
    return Method.RENORMALISE


COUNTS = (
    Rule(
        name="routing_method",
        label="routing method",
        read="nothing",
        described=(
            (r"softmax → topk(?! →)", Method.DEFAULT.value),
            (r"softmax → topk → renormali[sz]e|topk → softmax", Method.RENORMALISE.value),
            (r"top1 → sigmoid", Method.LLAMA4.value),
            (r"topk-only routing", Method.EVEN.value),
            (r"with deepseek-?v3 routing", Method.DEEPSEEK.value),
        ),
    ),
    *(
        Rule(  # a count, by its names in a reference and as axes, and by the letters before it in a name
            name=names[0],
            label=names[0],
            assigned=names,
            axes=names,
            described=((rf"\b{names[0]}\b ?[=:] ?(\d+)", None),),
            named=((rf"_{letters}(\d+)(?:_|$)", None),),
            config=(in_config,),
        )
        for letters, in_config, names in (
            ("topk", "num_experts_per_tok", ("top_k", "topk", "num_experts_per_tok")),
            ("ng", "n_group", ("n_group", "num_groups", "num_expert_group")),
            ("kg", "topk_group", ("topk_group", "top_k_group")),
        )
    ),
    Rule(
        name="topk_ids",
        label="form of topk_ids",
        reader="experts_with_weights",
        read="packed where something is shifted right by 16, else plain",
        needs="topk_ids",
        described=((r"\bpacked\b", "packed"), (r"\bplain\b|\bexpert (?:ids|indices)\b", "plain")),
        defaults={
            "fused_moe.trtllm_fp4_block_scale_routed_moe": ("topk_ids", "packed"),
            "fused_moe.trtllm_fp8_block_scale_routed_moe": ("topk_ids", "packed"),
        },
    ),
)


# The formula.


def sum_one(weights: torch.Tensor, more: float = 0.0) -> torch.Tensor:
    """Weights [..., top_k] divided by their sum over the last axis, plus `more` in a mutant."""
    return weights / (weights.sum(-1, keepdim=True) + more)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` best along the last axis, best first; of equals the lowest index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


# (logits [..., experts], the chosen experts [..., top_k], bias if any) -> their weights [..., top_k]
Weigh = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]
WEIGHTS: Mapping[Method, Weigh] = {
    Method.DEEPSEEK: lambda logits, experts, _: sum_one(torch.sigmoid(logits.gather(-1, experts))),
    Method.RENORMALISE: lambda logits, experts, _: torch.softmax(logits.gather(-1, experts), -1),
    Method.LLAMA4: lambda logits, experts, _: torch.sigmoid(logits.gather(-1, experts)),
    Method.DEFAULT: lambda logits, experts, _: torch.softmax(logits, -1).gather(-1, experts),
    Method.EVEN: lambda logits, experts, _: torch.full_like(
        logits[..., : experts.shape[-1]], 1 / experts.shape[-1]
    ),
}


def choose(
    routing: Routing,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    factor: float = 1.0,
    *,
    weigh: Mapping[Any, Weigh] = NOTHING,
    counted: int = 2,
    kth: bool = True,
) -> ChosenExperts:
    """Experts chosen by logits [..., experts], and their weights times `factor`, in the logits' precision.

    In mutants `weigh` replaces functions of WEIGHTS, a group counts its `counted` best, and without `kth` the k-th
    expert is replaced by the next.
    """
    if routing.biased and bias is not None:
        logits, bias = logits + bias.to(logits.dtype), None
    experts = best(_scores(routing, logits, bias, counted), routing.top_k + (not kth))
    if not kth:
        experts = torch.cat([experts[..., :-2], experts[..., -1:]], -1)
    return ChosenExperts(experts, {**WEIGHTS, **weigh}[routing.method](logits, experts, bias) * factor)


def choice_by_input(routing: Routing, wide: Wide, *, extent: bool = True) -> ChosenExperts:
    """The choice that is an input; in a mutant without `extent`, places beyond a plan's valid end count, too."""
    if routing.method == Method.PLANNED:
        weights = wide["topk_weights"] * wide.number("routed_scaling_factor", 1.0)
        pairs, expert_of_block = wide["sorted_token_ids"].long(), wide["expert_ids"].long()
        block = len(pairs) // max(len(expert_of_block), 1)
        valid = int(wide["num_tokens_post_padded"]) if extent else len(pairs)
        experts = torch.full((weights.numel() + 1,), -1, dtype=torch.int64, device=pairs.device)  # + 1: padding
        experts[pairs[:valid].clamp(max=weights.numel())] = expert_of_block.repeat_interleave(block)[:valid]
        return ChosenExperts(experts[:-1].view(weights.shape), weights)
    topk_ids = wide.given("topk_ids")
    if routing.method == Method.PACKED:
        weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).to(wide.dtype)
        return ChosenExperts((topk_ids >> PACKED_SHIFT).to(torch.int64), weights)
    if routing.method == Method.UNIFORM:
        weight = wide.number("routed_scaling_factor", 1.0) / routing.top_k
        weights = torch.full(topk_ids.shape, weight, dtype=wide.dtype, device=topk_ids.device)
        return ChosenExperts(topk_ids.to(torch.int64), weights)
    return ChosenExperts(topk_ids.to(torch.int64), wide["topk_weights"])


def pack(experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int32 `topk_ids` from expert indices and non-negative bfloat16 weights."""
    bits = weights.view(torch.int16).to(torch.int32)
    return (experts.to(torch.int32) << PACKED_SHIFT) | bits


def choice_of(
    wide: Wide,
    *,
    routed: Callable[[Routing], Routing] = lambda routing: routing,
    chosen: Callable[[ChosenExperts], ChosenExperts] = lambda choice: choice,
    sharing: float = 1.0,
    extent: bool = True,
    **ways: Any,  # noqa: ANN401 - those of `choose`
) -> ChosenExperts:
    """Experts and weights of every token, shared ones last; mutants change the routing or the choice."""
    routing = routed(routing_of(wide.definition))
    if routing.by_input:
        return chosen(choice_by_input(routing, wide, extent=extent))
    factor = wide.number("routed_scaling_factor", 1.0)
    choice = chosen(choose(routing, wide["routing_logits"], wide.maybe("routing_bias"), factor, **ways))
    first_shared = routing.local + int(wide.number("local_expert_offset", 0))
    shared = choice.experts.new_tensor(range(first_shared, first_shared + routing.shared))
    shape = (*choice.experts.shape[:-1], routing.shared)
    return ChosenExperts(
        torch.cat([choice.experts, shared.expand(shape)], -1),
        torch.cat([choice.weights, choice.weights.new_full(shape, sharing)], -1),
    )


def _biased(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Sigmoids of logits [..., experts], plus the bias [experts] if there is one."""
    scores = torch.sigmoid(logits)
    return scores if bias is None else scores + bias.to(scores.dtype)


def _group_scores(routing: Routing, scores: torch.Tensor, counted: int = 2) -> torch.Tensor:
    """Score of each group, [..., groups]: the sum of its `counted` best scores [..., experts]."""
    grouped = scores.view(*scores.shape[:-1], routing.groups, scores.shape[-1] // routing.groups)
    return torch.sort(grouped, dim=-1, descending=True).values[..., :counted].sum(-1)


def _scores(routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None, counted: int = 2) -> torch.Tensor:
    """Scores [..., experts] that experts are chosen by; -inf in groups that are not kept."""
    if routing.method != Method.DEEPSEEK:
        return logits + bias.to(logits.dtype) if routing.biased and bias is not None else logits
    scores = _biased(logits, bias)
    best_groups = best(_group_scores(routing, scores, counted), routing.top_groups)
    kept = torch.zeros((*scores.shape[:-1], routing.groups), dtype=torch.bool, device=scores.device)
    kept.scatter_(-1, best_groups, value=True)
    group_size = scores.shape[-1] // routing.groups
    return scores.masked_fill(~kept.repeat_interleave(group_size, -1), -torch.inf)


# Random logits, biases and choices, with margins that roundings do not overcome.

TRIALS = 16  # rows drawn for each row needed
# Of these the row with the smallest margin of at least CLEAR is taken: above two roundings of a bfloat16 score
# (2**-8 each below 2), but so small that a score with a larger error chooses other experts.
CLEAR = 2.0**-6
DIGITS = 1 << 20  # margins are compared on this grid, so that the last bit of an exp() decides nothing
LOCAL_BOOST = 1.0  # added to local experts' logits; else an eighth of the experts would get few tokens
HOT = 12.0  # added to the logit of a token's favoured expert
REMOTE = 30.0  # subtracted from local experts' logits
WEAK, STRONG = 2.0, 5.0  # sigmoid(-2) is 0.12, sigmoid(5) is 0.993
FAINT = 18.4  # sigmoid(-18.4) is 1e-8
FAINT_BIAS = 32.0  # multiplies the usual bias of +-1/2; a power of two, so that it stays exact in bfloat16
ALONE = 6.0  # added to the logit of one expert of a tied pair
# Per pattern the one of `count` local experts that it sends a token to.
FAVOURED: Mapping[str, Callable[[int], int]] = {
    "hot": lambda count: count // 2,
    "steep": lambda count: count // 2,
    "faint": lambda count: count // 2,
    "first": lambda _: 0,
    "last": lambda count: count - 1,
}
# Change of a pattern to its rows of logits; and the logit of its favoured expert, if HOT is not just added.
SHAPES: Mapping[str, Part] = {
    "negative": lambda row: -row.abs() - 0.5,
    "steep": lambda row: row / 4 - WEAK,
    "faint": lambda row: row / 2 - FAINT,
}
LEVELS = {"steep": STRONG, "faint": -FAINT}


def offset_of(params: Mapping[str, Any]) -> int:
    """The first local expert among all, in a case with these drawing instructions."""
    return int(params.get("offset", 0))


def _patterns(params: Mapping[str, Any], tokens: int) -> list[str]:
    """The pattern of each token: those of the case, again and again."""
    patterns: Sequence[str] = params.get("rows", ("plain",))
    return [patterns[token % len(patterns)] for token in range(tokens)]


def _favoured(routing: Routing, params: Mapping[str, Any], pattern: str) -> int:
    """Index, among all experts, of the one that a pattern sends a token to."""
    return offset_of(params) + FAVOURED[pattern](routing.local)


def margins(
    routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None, *, pairs: bool = False
) -> torch.Tensor:
    """Least gap between a chosen score, or group's score, and one not chosen: float64 [...], 0 for a tie.

    With `pairs`, two scores that tie at the boundary count as one, since their experts are interchangeable.
    """
    logits = logits.to(torch.float64)
    margin = _gap(_scores(routing, logits, bias), routing.top_k, pairs=pairs)
    if routing.top_groups < routing.groups:
        by_group = _group_scores(routing, _biased(logits, bias))
        margin = torch.minimum(margin, _gap(by_group, routing.top_groups, pairs=False))
    return margin


def _gap(scores: torch.Tensor, count: int, *, pairs: bool) -> torch.Tensor:
    """Gap [...] between the `count`-th largest of scores [..., n] and the next; inf if there is no next."""
    ranked = torch.sort(scores, dim=-1, descending=True).values
    edge = torch.full_like(ranked[..., :1], torch.inf).repeat_interleave(2, -1)
    ranked = torch.cat([edge, ranked, -edge], -1)
    gaps = (ranked[..., :-1] - ranked[..., 1:]).nan_to_num(nan=torch.inf)
    boundary = count + 1  # after the two of `edge`
    gap = gaps[..., boundary]
    if not pairs:
        return gap
    return torch.where(gap > 0, gap, torch.minimum(gaps[..., boundary - 1], gaps[..., boundary + 1]))


def drawn_logits(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Logits [tokens, experts] in the case's patterns: per token the best of TRIALS random rows.

    Best: a local expert is chosen, or none if the pattern is "remote"; then, the last chosen and the first
    rejected expert differ clearly, and as little as possible. Computed on the CPU: all devices get the same rows.
    """
    routing, params, tokens = routing_of(wanted.definition), wanted.params, wanted.shape[0]
    bias_spec = wanted.definition.inputs.get("routing_bias")
    bias = None if bias_spec is None or bias_spec.optional else drawn_bias(draw, wanted).cpu()
    pairs = bool(params.get("ties"))
    trials = draw.normal("routing_logits", (TRIALS, tokens, routing.experts), scale=2.0).cpu()
    if routing.method == Method.LLAMA4:
        # The largest of many logits has a sigmoid near 1, and a mutant without the sigmoid would not show, so the
        # largest is moved to about 0. Pairs come first: else the largest may be one that its double replaces.
        if pairs:
            trials[..., 1::2] = trials[..., 0::2]
        level = draw.normal("routing_level", (TRIALS, tokens, 1), scale=0.5).cpu()
        trials += level - trials.amax(-1, keepdim=True)
    logits = _patterned(routing, params, trials).to(wanted.dtype)
    margin = (margins(routing, logits, bias, pairs=pairs).clamp(max=1.0) * DIGITS).round()
    worth = torch.where(margin >= CLEAR * DIGITS, 2 * DIGITS - margin, margin)
    local = choose(routing, logits.to(torch.float64), bias).experts - offset_of(params)
    is_local, patterns = ((local >= 0) & (local < routing.local)).any(-1), _patterns(params, tokens)
    remote = torch.tensor([pattern == "remote" for pattern in patterns], dtype=torch.bool)
    best_trial = (worth + DIGITS * 4.0 * (is_local != remote)).argmax(0)
    return logits[best_trial, torch.arange(tokens)].to(draw.device)


def _patterned(routing: Routing, params: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """Logits [trials, tokens, experts], changed in place to the case's pattern of every token."""
    offset = offset_of(params)
    local = slice(offset, offset + routing.local)
    if routing.local < routing.experts:
        logits[..., local] += LOCAL_BOOST
    for token, pattern in enumerate(_patterns(params, logits.shape[1])):
        rows = logits[:, token]
        if pattern in SHAPES:
            rows.copy_(SHAPES[pattern](rows))
        if pattern == "equal" and routing.method == Method.DEEPSEEK:  # the bias decides
            rows.zero_()
        elif pattern == "equal":  # only chosen ones are equal, so that no tie decides which are chosen
            rows.copy_(rows.clamp(max=0.0 if routing.biased else 1.0).scatter(-1, best(rows, routing.top_k), 2.0))
        if pattern == "remote" and routing.local < routing.experts:
            rows[:, local] -= REMOTE
        if pattern in FAVOURED:
            expert = _favoured(routing, params, pattern)
            rows[:, expert] = LEVELS.get(pattern, rows[:, expert] + HOT)
    if params.get("ties"):
        logits[..., 1::2] = logits[..., 0::2]
        if routing.top_k % 2 == 0:  # raise one expert, so that the boundary of the top k splits a pair
            logits[..., offset] += ALONE
    return logits


def lowered(params: Mapping[str, Any]) -> float:
    """What is taken off all biases where scalars are other ones: the choice stays, and all scores are negative."""
    return 1.5 if OTHER_SCALARS in params else 0.0


def drawn_bias(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Distinct biases [experts] within +-1/2, which overrule many sigmoids, and which fp8 does not hold exactly.

    For DEEPSEEK, of several orders the one with the largest margin of the choice at equal logits is taken.
    """
    routing, params = routing_of(wanted.definition), wanted.params
    dtype = dtype_of(named(wanted.definition)["routing_bias"])
    orders = [draw.permutation(f"routing_bias-{trial}", routing.experts).cpu() for trial in range(TRIALS)]
    step = 2.0 ** -(routing.experts - 1).bit_length()
    biases = ((torch.stack(orders) - routing.experts // 2 + 0.375) * step - lowered(params)).to(dtype)
    patterns = set(params.get("rows", ()))
    if params.get("ties"):
        biases[:, 1::2] = biases[:, 0::2]
        biases[:, offset_of(params)] = 1.0
    scale = FAINT_BIAS if "faint" in patterns else 1.0
    biases *= scale
    for pattern in FAVOURED.keys() & patterns:
        biases[:, _favoured(routing, params, pattern)] = scale
    trial = 0
    if routing.method == Method.DEEPSEEK:
        margin = margins(routing, torch.zeros_like(biases, dtype=torch.float32), biases)
        trial = int((margin * DIGITS).round().argmax())
    return biases[trial].to(draw.device)


def distinct(draw: Draw, wanted: Wanted, experts: int) -> torch.Tensor:
    """Distinct experts in random order in each row of [rows, top_k], int64."""
    rows, top_k = wanted.shape
    return draw.words(wanted.name, rows * experts).view(rows, experts).argsort(dim=-1, stable=True)[:, :top_k]


def drawn_ids(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Distinct expert ids [tokens, top_k] in random order; tokens of a pattern in FAVOURED have that expert first.

    For Method.PACKED packed with bfloat16 weights, uniform in [0.05, 0.55), which do not add up to 1.
    """
    routing, params, tokens = routing_of(wanted.definition), wanted.params, wanted.shape[0]
    experts = distinct(draw, replace(wanted, name="topk_ids", shape=(tokens, routing.top_k)), routing.experts)
    for row, pattern in zip(experts, _patterns(params, tokens), strict=True):
        if pattern in FAVOURED:
            favoured = _favoured(routing, params, pattern)
            row[row == favoured] = row[0].clone()  # swapped, so that ids stay distinct
            row[0] = favoured
    if routing.method is not Method.PACKED:
        return experts.to(wanted.dtype)
    return pack(experts, draw.uniform("topk_weights", experts.shape, torch.bfloat16, low=0.05, high=0.55))


def drawn_plan(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """An input of a plan: places sorted by expert, padded to blocks; the blocks' experts; or the valid length."""
    ids = replace(wanted, name="topk_ids", shape=wanted.shape_of("topk_weights"), dtype=torch.int64)
    expert_of_pair = drawn_ids(draw, ids).flatten().cpu()
    [blocks], [capacity] = wanted.shape_of("expert_ids"), wanted.shape_of("sorted_token_ids")
    size = capacity // blocks
    sorted_pairs, expert_of_block = (torch.zeros(count, dtype=torch.int64) for count in (capacity, blocks))
    used = 0  # blocks
    for expert in sorted(set(expert_of_pair.tolist())):
        pairs = (expert_of_pair == expert).nonzero().flatten()
        end = used + -(-len(pairs) // size)
        sorted_pairs[used * size : end * size] = len(expert_of_pair)  # padding
        sorted_pairs[used * size : used * size + len(pairs)] = pairs
        expert_of_block[used:end] = expert
        used = end
    plan = {
        "sorted_token_ids": sorted_pairs,
        "expert_ids": expert_of_block,
        "num_tokens_post_padded": torch.tensor([used * size]),
    }
    return plan[wanted.name].to(wanted.dtype).to(draw.device)


def one_chosen(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Logits [tokens, experts] with which one local expert has all the weight."""
    routing, tokens = routing_of(wanted.definition), wanted.shape[0]
    place = draw.integers("one chosen", (tokens, 1), torch.int64, low=0, high=routing.local)
    logits = torch.full(wanted.shape, -4 * SURE, dtype=wanted.dtype, device=draw.device)
    return logits.scatter_(-1, place + offset_of(wanted.params), SURE)


def all_weight_on_first(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """`topk_weights` of 1, 0, 0, ..., by which one expert counts; or `topk_ids`, with these weights if packed."""
    weights = torch.zeros(wanted.shape, dtype=torch.bfloat16, device=draw.device)
    weights[:, :1] = 1.0
    if wanted.dtype.is_floating_point:  # of `topk_weights`
        return weights.to(wanted.dtype)
    ids = drawn_ids(draw, wanted)
    is_packed = routing_of(wanted.definition).method is Method.PACKED
    return pack(ids >> PACKED_SHIFT, weights) if is_packed else ids


# Variants and mutants of a mixture's routing: changes of `choice_of`.


def _routes(condition: Callable[[Routing], bool]) -> Callable[[Wide], bool]:
    """Condition for `applies`: of a mixture's routing."""
    return lambda wide: condition(routing_of(wide.definition))


# to several experts with different weights
_unlike = _routes(lambda routing: routing.top_k > 1 and routing.method not in {Method.EVEN, Method.UNIFORM})


def _rerouted(name: str, **numbers: Callable[[int], int]) -> Mutant:
    """A mutant that routes with changed fields of Routing (`numbers` has the changes), where this is possible."""

    def changed(routing: Routing) -> Routing:
        changes: dict[str, Any] = {one: change(getattr(routing, one)) for one, change in numbers.items()}
        return replace(routing, **changes)

    def possible(routing: Routing) -> bool:
        grouped = "top_groups" in numbers
        return not routing.by_input and changed(routing).misfit is None and (routing.groups > 1 or not grouped)

    return Mutant(name, applies=_routes(possible), routed=changed)


def _weighed(name: str, weigh: Mapping[Method, Weigh]) -> Mutant:
    """A mutant that computes the chosen experts' weights by other functions, for the methods in `weigh`."""
    return Mutant(name, applies=_routes(lambda routing: routing.method in weigh), weigh=weigh)


def with_bias(logits: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A mutant's weights of DeepSeek's routing, with the bias."""
    return sum_one(_biased(logits, bias).gather(-1, experts))


MISROUTED = (
    altered(
        "routing bias dropped",
        "routing_bias",
        change=lambda bias: bias * 0,
        applies=_routes(lambda routing: routing.biased or routing.method is Method.DEEPSEEK),
    ),
    _weighed("routing bias kept in the weights", {Method.DEEPSEEK: with_bias}),
    _weighed(
        "renormalisation dropped",
        {Method.DEEPSEEK: WEIGHTS[Method.LLAMA4], Method.RENORMALISE: WEIGHTS[Method.DEFAULT]},
    ),
    _weighed("weights of sum 1", {Method.DEFAULT: WEIGHTS[Method.RENORMALISE]}),
    _weighed(
        "another score than the method's",
        {
            Method.DEEPSEEK: WEIGHTS[Method.RENORMALISE],
            Method.RENORMALISE: WEIGHTS[Method.DEEPSEEK],
            Method.LLAMA4: lambda logits, experts, _: ones(logits.gather(-1, experts)),
            Method.DEFAULT: WEIGHTS[Method.DEEPSEEK],
            Method.EVEN: WEIGHTS[Method.RENORMALISE],
        },
    ),
    _rerouted("group limit ignored", groups=lambda _: 1, top_groups=lambda _: 1),
    _rerouted("one group too few", top_groups=lambda count: count - 1),
    _rerouted("one group too many", top_groups=lambda count: count + 1),
    Mutant("a group counts its best expert", applies=_routes(lambda routing: routing.groups > 1), counted=1),
    _rerouted("one expert too few", top_k=lambda k: k - 1),
    _rerouted("one expert too many", top_k=lambda k: k + 1),
    Mutant("k-th expert replaced by the next", applies=_rerouted("", top_k=lambda k: k + 1).applies, kth=False),
    Mutant(
        "last expert dropped",
        applies=_routes(lambda routing: routing.top_k > 1),
        chosen=lambda choice: ChosenExperts(choice.experts[:, :-1], choice.weights[:, :-1]),
    ),
    *(
        Mutant(name, applies=_unlike, chosen=lambda one, change=change: replace(one, weights=change(one.weights)))
        for name, change in (
            ("experts weigh alike", lambda weights: weights.mean(-1, keepdim=True).expand_as(weights)),
            ("weights in another order", lambda weights: weights.flip(-1)),
        )
    ),
    *(
        Mutant(name, applies=_routes(lambda routing: routing.shared > 0), sharing=weight)
        for name, weight in (("shared experts left out", 0.0), ("shared experts at half their weight", 0.5))
    ),
    Mutant("blocks beyond the plan's extent", applies=has("sorted_token_ids"), extent=False),
)


# Routers in models.


def facts_of_top_k(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """Settings of SGLang's top-k module."""
    config = module.topk_config
    bias = config.correction_bias
    return {
        "top_k": config.top_k,
        "grouped": config.use_grouped_topk,
        "groups": config.num_expert_group,
        "kept_groups": config.topk_group,
        "renormalise": config.renormalize,
        "scoring": config.scoring_func,
        "own": config.custom_routing_function is not None,
        "bias": None if bias is None else dtype_name(bias),
        "scaling_factor": config.routed_scaling_factor,
    }


def method_of(scoring: object, renormalised: object, grouped: object) -> str | None:
    """Name of a routing, None if no form has it. Sigmoids in one group are DeepSeek's form with n_group 1."""
    if scoring == "sigmoid":
        return "deepseek_v3" if renormalised else None
    if scoring != "softmax" or grouped:
        return None
    return "renormalise" if renormalised else "softmax"


def read_top_k(facts: Mapping[str, Any]) -> tuple[Any, bool, str | None]:
    """(scoring function, whether experts are chosen within groups, `method_of` both) of SGLang's top-k.

    Within groups, SGLang's top-k with a bias takes sigmoids, whatever `scoring` says.
    """
    scoring = "sigmoid" if facts["grouped"] and facts["bias"] else facts["scoring"]
    grouped = bool(facts["grouped"]) and (facts["groups"] or 1) > 1
    return scoring, grouped, method_of(scoring, facts["renormalise"], grouped)


CUSTOM = "routing by a function of the model's own: no form"


def formless(facts: Mapping[str, Any]) -> str | None:
    """Why no form fits SGLang's top-k; None if one does."""
    scoring, _, method = read_top_k(facts)
    if facts["own"]:
        return CUSTOM
    if method is None:
        return f"routing by {scoring}, renormalised {facts['renormalise']}: no form"
    return "routing by softmax and a bias: no form" if method == "renormalise" and facts["bias"] else None


def router_call(module: ModelModule, reading: Reading) -> KernelCall | str:
    """Kernel call of the router for a top-k module beside its experts, or why no form fits it."""
    facts = module.facts
    if facts["own"]:
        return CUSTOM
    place = (module.parent, module.parent_class)
    mixtures = (
        one for one in reading.modules if one.kind == "experts" and (one.parent, one.parent_class) == place
    )
    experts = next((one.facts["experts"] for one in mixtures), None)
    scoring, grouped, method = read_top_k(facts)
    plain = scoring == "softmax" and not (grouped or facts["bias"])
    limited = method == "deepseek_v3" and facts["bias"]
    if (plain or limited) and experts is not None:
        groups: Facts = {name: facts[name] or 1 for name in ("groups", "kept_groups") if limited}
        return call_of(module, "router", "top_k", experts=experts, routing=method, **groups)
    how = "renormalised" if facts["renormalise"] else "not renormalised"
    parts = [", within groups"] * grouped + [", with a bias"] * bool(facts["bias"])
    return f"routing by {scoring}, {how}{''.join(parts)}: no form"


# The router alone: a softmax over its logits.


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Softmax over the last axis; the largest logit is subtracted first, so that exp does not overflow."""
    return sum_one(torch.exp(logits - logits.amax(-1, keepdim=True)))


def renormalised(wide: Wide) -> bool:
    """Whether the weights of a token sum to 1."""
    return bool(wide.number("renormalize"))


def route(
    wide: Wide,
    *,
    score: Part = softmax,
    after: Part = same,
    sums: bool | None = None,
    first: int = 0,
    worst: bool = False,
) -> Tensors:
    """The k experts with the best scores, best first; weights are their scores, or these divided by their sum.

    In mutants `after` changes the chosen scores, `sums` sets whether they are divided by their sum, `first` is the
    rank of the first one chosen, and `worst` chooses the lowest scores.
    """
    scores, experts = score(wide["router_logits"]).sort(dim=-1, descending=not worst, stable=True)
    chosen = slice(first, first + (dim(wide.definition, "topk_ids", 1) or 0))
    weights = after(scores[:, chosen])
    if renormalised(wide) if sums is None else sums:
        weights = sum_one(weights)
    return {"topk_weights": weights, "topk_ids": experts[:, chosen]}


def ranks(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Logits [tokens, experts] at equal steps in random order, so that every precision has the same k best."""
    rows, experts = wanted.shape
    order = draw.orders(wanted.name, (rows, experts)).argsort(-1).to(torch.float32)
    step = 2.0 ** -(max(experts - 1, 1).bit_length() - 3)
    row_scale = torch.exp2(-(torch.arange(rows, device=order.device) % 3.0))[:, None]  # unlike the next row's
    logits = (order - experts // 2) * row_scale * (step * float(wanted.params.get("scale", 1.0)))
    return logits.to(wanted.dtype)


def fine_ranks(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """`ranks` with up to 255 * 2**-16 added or subtracted, which 16-bit floats do not hold."""
    fine = draw.integers(f"{wanted.name}.apart", wanted.shape, low=-255, high=256) * 2.0**-16
    return (ranks(draw, wanted).float() + fine).to(wanted.dtype)


def sure_ranks(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Logits whose best has all the weight; in float32 the best two share it, later pairs are equal in 16 bits."""
    order = draw.orders(wanted.name, wanted.shape).argsort(-1).float()
    steps = order // 2 + order * 2.0**-17 if wanted.dtype is torch.float32 else order
    return (steps * (-2 * SURE)).to(wanted.dtype)


def hashed(
    wide: Wide, *, curve: Part = lambda logits: softplus(logits).sqrt(), sums: Part = sum_one, tokens: Part = same
) -> Tensors:
    """Experts by a table of token ids; their weights are sqrt(softplus(logit)), divided by the sum."""
    experts = wide["tid2eid"].long()[tokens(wide["input_ids"])]
    return {"topk_weights": sums(curve(wide["router_logits"]).gather(-1, experts)), "topk_ids": experts}


def grouped(wide: Wide, *, counted: int = 2, weigh: Weigh | None = None, limited: bool = True) -> Tensors:
    """DeepSeek's choice; in mutants groups count their `counted` best or are not `limited`, or weights differ."""
    groups, top_groups = (int(wide.number(name)) if limited else 1 for name in ("n_group", "topk_group"))
    routing = replace(_routing_alone(wide.definition), groups=groups, top_groups=top_groups)
    weights = NOTHING if weigh is None else {Method.DEEPSEEK: weigh}
    factor = wide.number("routed_scaling_factor")
    choice = choose(routing, wide["scores"], wide["bias"], factor, weigh=weights, counted=counted)
    return {"topk_values_out": choice.weights, "topk_indices_out": choice.experts}


def _routing_alone(definition: Definition) -> Routing:
    """DeepSeek's routing by a router's definition, whose experts are all local."""
    [experts, top_k] = (
        definition.const_axes[(spec.shape or ("", ""))[1]]
        for spec in (definition.inputs["scores"], definition.inputs["topk_values"])
    )
    return Routing(
        method=Method.DEEPSEEK, top_k=top_k, experts=experts, local=experts, groups=GROUPS, top_groups=KEPT_GROUPS
    )


def clearest(draw: Draw, wanted: Wanted, *, exact: bool = False) -> torch.Tensor:
    """Of TRIALS random rows of scores [tokens, experts], each token's with the clearest choice and order.

    Scores are normal, or, if `exact`, 0 or SURE: sigmoids of 1/2, and of 1 so few that both are chosen. In the
    case `faint` their sigmoids are near 2e-5, which (1 + tanh(x / 2)) / 2 in float32 still gives within 1 %.
    """
    name, shape = wanted.name, (TRIALS, *wanted.shape)
    scores = (draw.integers(name, shape, low=0, high=16) == 0) * SURE if exact else draw.normal(name, shape) * 2
    if "faint" in wanted.params:
        scores = scores / 4 - 11
    trials = scores.to(wanted.dtype).cpu()
    bias = evenly_spaced_bias(draw, replace(wanted, name="bias", shape=wanted.shape[1:])).cpu()
    routing = _routing_alone(wanted.definition)
    best = (margins(replace(routing, top_k=count), trials, bias) for count in range(1, routing.top_k + 1))
    margin = (torch.stack([*best]).amin(0) * DIGITS).round()
    return trials[margin.argmax(0), torch.arange(trials.shape[1])].to(draw.device)


def evenly_spaced_bias(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Distinct biases [experts] of few bits: multiples of 1 / 2**n within +-1/2, shuffled, less `lowered`.

    In the case `faint` they decide alone, within +-16: of TRIALS orders the one whose choice is clearest.
    """
    experts, faint = wanted.shape[0], "faint" in wanted.params
    orders = [draw.permutation(f"{wanted.name}{turn or ''}", experts) for turn in range(TRIALS if faint else 1)]
    biases = (torch.stack(orders) - experts // 2) * 2.0 ** -(experts - 1).bit_length() - lowered(wanted.params)
    biases = (biases * (FAINT_BIAS if faint else 1.0)).to(wanted.dtype)
    if not faint:
        return biases[0]
    margin = margins(_routing_alone(wanted.definition), torch.zeros_like(biases, dtype=torch.float32), biases)
    return biases[int(margin.cpu().argmax())]


def never_far_below(tensors: Mapping[str, torch.Tensor], params: Mapping[str, Any]) -> None:
    """Keep logits that a case scales up positive: four weights of logits below -100 are 0 / 0 in float32."""
    if params.get(UNUSUAL) == "large":
        tensors["router_logits"].abs_()


def spoiled(name: str, *outputs: str, change: Part) -> Mutant:
    """A mutant that changes the first of these outputs that a form has."""

    def spoil(_: Wide, correct: Tensors) -> Tensors:
        output = next(one for one in outputs if one in correct)
        return {output: change(correct[output])}

    return Mutant(name, outputs=spoil)


GROUPS, KEPT_GROUPS = 8, 4
HASHED = Op(
    "moe_routing",
    Form(
        "router_logits[n e] input_ids[n] tid2eid[v k] num_fused_shared_experts routed_scaling_factor"
        " -> topk_weights[n k] topk_ids[n k]",
        hashed,
    ),
    scalars={"num_fused_shared_experts": 0, "routed_scaling_factor": 2.5},
    draws={
        "input_ids": below("tid2eid"),
        "tid2eid": lambda draw, one: distinct(draw, one, one.shape_of("router_logits")[1]).to(one.dtype),
    },
    adversarial={name: ADVERSARIAL[name] for name in ("tiny", "offset")},
    adversarial_inputs=("router_logits",),
    adjust=never_far_below,
    unread={"num_fused_shared_experts routed_scaling_factor": "of shared experts alone"},
    unusual={"large": (), SEEN: ()},
    gates={"topk_ids": Exact("a table says which")},
    roundings={"topk_weights": 16.0},
    mutants=(
        Mutant("softmax", curve=softmax),
        Mutant("sigmoid", curve=lambda logits: torch.sigmoid(logits)),
        Mutant("softplus without its root", curve=softplus),
        Mutant("root of the logit", curve=lambda logits: logits.clamp_min(0).sqrt() + 1e-6),
        Mutant("sums not brought to 1", sums=same),
        Mutant("experts of the next token", tokens=lambda ids: ids.roll(1)),
        spoiled("weights of the next slot", "topk_weights", change=lambda weights: weights.roll(1, -1)),
        spoiled("weights in bfloat16", "topk_weights", change=lambda weights: weights.bfloat16().float()),
    ),
)
GROUPED = Op(
    "moe_routing",
    Form(
        "scores[n e] bias[e] n_group topk_group topk routed_scaling_factor topk_values[n k] topk_indices[n k]"
        " -> topk_values_out[n k] topk_indices_out[n k]",
        grouped,
    ),
    scalars={"n_group": GROUPS, "topk_group": KEPT_GROUPS, "routed_scaling_factor": 2.5},
    requires=lambda definition: _routing_alone(definition).misfit,
    draws={
        "scores": clearest,
        "bias": evenly_spaced_bias,
        "topk_indices": lambda draw, wanted: torch.zeros(wanted.shape, dtype=wanted.dtype, device=draw.device),
    },
    sizes_in_numbers=("topk",),
    lossless={
        "scores": partial(clearest, exact=True),
        "bias": evenly_spaced_bias,
        "topk_values": 0.0,
        "routed_scaling_factor": 164.5 / 64,  # / 4 it is midway between two bfloat16 numbers, / 5 just beyond
    },
    unread={"topk topk_values topk_indices": "it is written over, or its size"},
    adversarial={"faint": {"faint": 1.0}},
    unusual={},
    gates={"topk_indices_out": Exact("no two experts are equally good")},
    mutants=(
        Mutant("a group counts its best expert", counted=1),
        Mutant("a group counts three", counted=3),
        Mutant("groups not limited", limited=False),
        Mutant("weights with the bias", weigh=with_bias),
        Mutant(
            "1e-6 in the sum",
            weigh=lambda logits, experts, _: sum_one(torch.sigmoid(logits.gather(-1, experts)), 1e-6),
        ),
        Mutant("sums not brought to 1", weigh=WEIGHTS[Method.LLAMA4]),
        Mutant("softmax of the chosen", weigh=WEIGHTS[Method.RENORMALISE]),
        altered("bias dropped", "bias", change=lambda bias: bias * 0),
        altered("factor dropped", "routed_scaling_factor", change=lambda _: 1.0),
        spoiled("weights of the next slot", "topk_values_out", change=lambda weights: weights.roll(1, -1)),
    ),
)
# Routers that also return the row of each pair of token and slot: rows of an expert are consecutive, padded to
# whole blocks. The order of an expert's pairs is open, and so are values beyond the valid part.


def route_plan(
    wide: Wide,
    *,
    chosen: Part = same,
    weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda logits, _: softmax(logits),
    block_by: int = 1,
) -> Tensors:
    """The k best experts and the softmax over them; with AlphaMoE's list of pairs, or TensorRT-LLM's permutation.

    The list has pairs as token * top_k + slot, and their number as padding. The permutation has the row of each
    pair, the token of each row, and per block of rows its expert and where its rows end. Entries of equal
    `@groups` may be exchanged; `@free` ones may have any value. Mutants rank experts by `chosen` of the logits,
    `weigh` (logits of the chosen, all logits) otherwise, or have blocks smaller by the factor `block_by`.
    """
    as_list = "logits" in wide  # else as a permutation
    logits = wide["logits" if as_list else "routing_logits"]
    size = int(wide.number("block_m" if as_list else "tile_tokens_dim")) // block_by
    count, device = logits.shape[1], logits.device
    experts = best(chosen(logits), int(wide.number("top_k")))
    expert_of_pair = experts.flatten()
    pair = torch.arange(len(expert_of_pair), device=device)
    # An expert's pairs, in their order, have consecutive rows from the first row of its first block.
    pairs_of_expert = torch.bincount(expert_of_pair, minlength=count)
    blocks_of_expert = -(-pairs_of_expert // size)
    used = int(blocks_of_expert.sum())
    first_row = (blocks_of_expert.cumsum(0) - blocks_of_expert) * size
    pairs_before = pairs_of_expert.cumsum(0) - pairs_of_expert
    order = expert_of_pair.argsort(stable=True)
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = pair + (first_row - pairs_before)[expert_of_pair[order]]
    block = torch.arange(most_blocks(len(pair), count, size), device=device)
    expert_of_block = torch.zeros_like(block)
    expert_of_block[:used] = torch.arange(count, device=device).repeat_interleave(blocks_of_expert)
    unused, row = block >= used, torch.arange(len(block) * size, device=device)
    # By row its pair or token; and its expert, within which rows may be exchanged, or if padding its own number.
    listed = torch.full_like(row, len(pair)).index_put(
        (row_of_pair,), pair if as_list else pair // experts.shape[1]
    )
    groups = (row + count).index_put((row_of_pair,), expert_of_pair)
    outputs: Tensors = {"topk_weights": weigh(logits.gather(-1, experts), logits), "topk_ids": experts}
    if not as_list:
        ends = torch.minimum((block + 1) * size, (first_row + pairs_of_expert)[expert_of_block])
        return outputs | {
            "total_num_padded_tokens": torch.full((1,), used * size, device=device),
            "expanded_idx_to_permuted_idx": row_of_pair.view_as(experts),
            "expanded_idx_to_permuted_idx@groups": experts,
            "permuted_idx_to_token_idx": listed,
            "permuted_idx_to_token_idx@groups": groups,
            "permuted_idx_to_token_idx@free": groups >= count,
            "cta_idx_xy_to_batch_idx": expert_of_block,
            "cta_idx_xy_to_batch_idx@free": unused,
            "cta_idx_xy_to_mn_limit": ends,
            "cta_idx_xy_to_mn_limit@free": unused,
            "num_non_exiting_ctas": torch.full((1,), used, device=device),
        }
    workspaces = {"expert_counts": count, "expert_offsets": count + 1, "expert_scatter_offsets": count}
    for name, length in workspaces.items():
        outputs |= {name: torch.zeros(length), f"{name}@free": torch.ones(length, dtype=torch.bool)}
    return outputs | {
        "sorted_token_ids": listed,
        "sorted_token_ids@groups": groups,
        "sorted_token_ids@free": row >= used * size,
        "expert_ids": expert_of_block,
        "expert_ids@free": unused,
        "num_tokens_post_padded": torch.full((1,), used * size, device=device),
    }


def most_blocks(pairs: int, experts: int, size: int) -> int:
    """Most blocks that the pairs may need: one per expert that has pairs, and as many as the other pairs fill."""
    least = min(experts, pairs)
    return least + (pairs - least) // size


def capacity(at: Mapping[str, int]) -> int:
    """`most_blocks` by the sizes of axes."""
    return most_blocks(at["n"] * at["k"], at["e"], size_of_block(at))


def size_of_block(at: Mapping[str, int]) -> int:
    """Rows per block."""
    return at.get("block_m") or at["tile_tokens_dim"]


def first_twice(pairs: torch.Tensor) -> torch.Tensor:
    """A mutant's rows: the first one's entry for the second, too."""
    changed = pairs.flatten().clone()
    changed[1:2] = changed[:1]
    return changed.view_as(pairs)


def tokens_of_rows(row_of_pair: torch.Tensor, _: Entries, tokens: Entries) -> Entries:
    """The oracle's entries for the token of each row, if an implementation put pairs into these rows [n k]."""
    token = torch.arange(row_of_pair.numel(), device=row_of_pair.device) // row_of_pair.shape[1]
    rows = row_of_pair.flatten().long().clamp(0, len(tokens[""]) - 1)  # others fail by themselves
    return {"": tokens[""].index_put((rows,), token), "free": tokens["free"]}


LISTED = ("sorted_token_ids", "expanded_idx_to_permuted_idx")
UNREAD = (
    "has_shared_expert routing_bias routing_method num_fused_shared_experts n_group topk_group local_expert_offset"
    " local_num_experts routed_scaling_factor norm_topk_prob"
)
PLANNED_ROWS = (
    "sorted_token_ids[p] expert_ids[c] num_tokens_post_padded[o] expert_counts[e] expert_offsets[f]"
    " expert_scatter_offsets[e]"
)
PERMUTED_ROWS = (
    "total_num_padded_tokens[o] expanded_idx_to_permuted_idx[n k] permuted_idx_to_token_idx[p]"
    " cta_idx_xy_to_batch_idx[c] cta_idx_xy_to_mn_limit[c] num_non_exiting_ctas[o]"
)
PLANS = Op(
    "moe_routing",
    Form(
        f"logits[n e] top_k block_m has_shared_expert -> topk_weights[n k] topk_ids[n k] {PLANNED_ROWS}",
        route_plan,
    ),
    Form(
        "routing_logits[n e] routing_bias[e]? routing_method top_k num_fused_shared_experts n_group topk_group"
        " local_expert_offset local_num_experts? routed_scaling_factor tile_tokens_dim norm_topk_prob"
        f" -> topk_ids[n k] topk_weights[n k] {PERMUTED_ROWS}",
        route_plan,
    ),
    where="has_shared_expert == 0",
    requires=lambda definition: (
        None
        if {"block_m", "tile_tokens_dim"} & definition.const_axes.keys()
        else "nobody states how many rows a block has"
    ),
    scalars={UNREAD: 0, "routing_method norm_topk_prob": 1, "routed_scaling_factor": 1.0},
    absent=("routing_bias", "local_num_experts"),
    unread={UNREAD: "one way of routing is known, on one rank"},
    sizes_in_numbers=("top_k", "block_m", "tile_tokens_dim"),
    sizes={
        "p": lambda at: capacity(at) * size_of_block(at),
        "c": capacity,
        "f": lambda at: at["e"] + 1,
        "o": (1,),
    },
    independent_rows=False,
    draws={"logits routing_logits": ranks},
    lossless={"logits routing_logits": sure_ranks},
    adversarial={},
    unusual={},
    gates={
        re.sub(r"\[[^]]*\]", "", f"topk_ids {PLANNED_ROWS} {PERMUTED_ROWS}"): Exact(
            "whole numbers, and no two experts are equally good"
        )
    },
    follows={"permuted_idx_to_token_idx": ("expanded_idx_to_permuted_idx", tokens_of_rows)},
    roundings={"topk_weights": 16.0},
    mutants=(
        Mutant("the worst experts", chosen=lambda logits: -logits),
        Mutant("softmax over all", weigh=lambda logits, every: logits.exp() / every.exp().sum(-1, keepdim=True)),
        Mutant("logits as weights", weigh=lambda logits, _: logits),
        Mutant("blocks half as large", block_by=2),
        spoiled("a pair twice", *LISTED, change=first_twice),
        spoiled("places of the next pair", *LISTED, change=lambda one: one.roll(1)),
        spoiled("another expert", "expert_ids", "cta_idx_xy_to_batch_idx", change=lambda one: one + 1),
        spoiled("a block less", "num_tokens_post_padded", "num_non_exiting_ctas", change=lambda one: one - 1),
        spoiled("rows end late", "sorted_token_ids", "cta_idx_xy_to_mn_limit", change=lambda one: one + 1),
    ),
)
MOE_ROUTING = Op(
    "moe_routing",
    Form("router_logits[n e] -> topk_weights[n k] topk_ids[n k]", route, constants=("renormalize",)),
    family="routing",
    least_outputs=2,
    unusual={},  # a row's logits differ by little, and the order of equal ones is open
    rules=(
        Rule(
            name="renormalize",
            label="renormalisation",
            assigned=("renormalize",),
            described=(
                (r"\b(?:not|without) (?:being )?renormali[sz]", 0),
                (r"(?<!not )(?<!without )\brenormali[sz]|\bsum to 1\b", 1),
            ),
            named=((r"_renorm(?:_|$)", 1), (r"^moe_routing_softmax_e\d+_k\d+$", 0)),
            config=("norm_topk_prob",),
        ),
    ),
    draws={"router_logits": ranks},
    lossless={"router_logits": fine_ranks},
    adversarial={"near": {"scale": 0.125}, "far": {"scale": 4.0}, "huge": {"scale": 32.0}},
    gates={"topk_ids": Exact("no two experts are equally good")},
    roundings={"topk_weights": 16.0},
    mutants=(
        Mutant(
            "softmax over the chosen, summing to 1",
            applies=lambda wide: not renormalised(wide),
            score=same,
            after=softmax,
        ),
        Mutant("sigmoid", score=lambda logits: torch.sigmoid(logits)),
        Mutant("logits as weights", score=same),
        Mutant("weights in bfloat16", after=lambda best: best.bfloat16().float()),
        Mutant("sums not brought to 1", applies=renormalised, sums=False),
        Mutant("the worst experts", worst=True, sums=True),
        Mutant("weights in the opposite order", after=lambda best: best.flip(-1)),
        Mutant("the best expert left out", first=1, sums=True),
        Mutant("halves of the logits", score=lambda logits: softmax(logits / 2)),
    ),
    other_forms=(HASHED, GROUPED, PLANS),
)
MOE_ROUTING.called("fused_moe.hash_topk:hash_topk", HASHED.forms[0].names, rows="router_logits", sm=SM80)
MOE_ROUTING.called(
    "fused_moe.fused_routing_dsv3:fused_topk_deepseek",
    GROUPED.forms[0].names,
    name="fused_topk_deepseek",
    written="topk_values topk_indices",
    rows="scores",
    sm=SM89,
)
TOPK_SOFTMAX = "sgl_kernel:topk_softmax"
SOFTMAX, LARGEST = "torch:softmax", "torch:topk"


@MOE_ROUTING.truth(
    "sglang",
    "topk_softmax",
    TOPK_SOFTMAX,
    accepts=lambda one: (one.outputs["topk_weights"].dtype, one.outputs["topk_ids"].dtype) == ("float32", "int32"),
    packages=("sgl_kernel",),
    sm=SM80,
)
def _sglang(api: Api, definition: Definition, inputs: Given) -> Outputs:
    logits = inputs["router_logits"]
    shape = (len(logits), dim(definition, "topk_ids", 1) or 0)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    api[TOPK_SOFTMAX](weights, experts, logits, bool(definition.constants.number("renormalize")))
    return {"topk_weights": weights, "topk_ids": experts}


@MOE_ROUTING.truth("torch", "softmax", SOFTMAX, LARGEST, rows=None)
def _pytorch(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Softmax, then top-k, by PyTorch in float32, as kernels compute; compared with the float64 oracle."""
    scores = api[SOFTMAX](inputs["router_logits"].float(), -1)
    weights, experts = api[LARGEST](scores, dim(definition, "topk_ids", 1), -1)
    if definition.constants.number("renormalize"):
        weights = sum_one(weights)
    return rounded(definition, {"topk_weights": weights, "topk_ids": experts})


def router_terms(facts: Mapping[str, Any], _: Evidence) -> Facts:
    """Facts of transformers' router in the terms of `router_call`."""
    method = method_of(facts.get("scoring"), facts.get("renormalise"), facts.get("groups", 1) > 1)
    groups = {name: facts.get(name) for name in ("groups", "kept_groups") if method == "deepseek_v3"}
    return {"experts": facts["experts"], "top_k": facts.get("top_k"), "routing": method, **groups}


MOE_ROUTING.extraction = Extraction(
    calls={"top_k": router_call},
    differs={"router": compared_with("experts", router_terms)},
    drafts={
        "router": lambda call, _: [draft(MOE_ROUTING.op_type, f"moe_routing_{call['routing']}", dict(call.facts))]
    },
)
