"""What modules and functions of a model do, found by trying them with values on a CPU."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from traceproof.ops.extraction import Facts

Tried = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
STRICT = 1e-5  # the two forms of gelu differ by 5e-4 at most
LOOSE = 1e-3  # between formulas in float32; those that are told apart differ by more
ROWS = 6  # tokens that a router is tried on
GROUPS = {"groups": ("n_group", "num_group", "num_expert_group"), "kept_groups": ("topk_group",)}


def attention(module: Any, query: Any, key: Any, value: Any, options: Mapping[str, Any]) -> Facts:  # noqa: ANN401
    """What an attention function is given, as facts."""
    scale = options.get("scaling")
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    return {
        "heads": query.shape[1],
        "kv_heads": key.shape[1],
        "qk_dim": query.shape[-1],
        "vo_dim": value.shape[-1],
        "scale": float(scale) if isinstance(scale, int | float) else None,
        "window": window if isinstance(window, int) else None,
        "logit_cap": options.get("softcap"),
        "sinks": options.get("s_aux") is not None,
    }


def rotary(function: Callable[..., Any], given: Sequence[Any], options: Mapping[str, Any]) -> Facts | None:
    """Width of the first argument, channels that the function turns, how it pairs them; None: it does not run."""
    generator = torch.Generator().manual_seed(0)
    try:
        arguments = [_real(one, generator) for one in given]
        named = {name: _real(one, generator) for name, one in options.items()}
        place, first = next((at, one) for at, one in enumerate(arguments) if isinstance(one, torch.Tensor))
        width = first.shape[-1]

        def run(query: torch.Tensor) -> torch.Tensor:
            out = function(*arguments[:place], query, *arguments[place + 1 :], **named)
            row = out[0] if isinstance(out, tuple) else out
            last: torch.Tensor = row.reshape(-1, width)[-1]
            return last

        moves = (run(first.clone()) - first.reshape(-1, width)[-1]).abs().gt(1e-6)
        turned, start = int(moves.sum()), int(moves.int().argmax())
        pair = []  # the other channels of a query that the first one turned depends on, from it
        for other in range(width):
            moved = first.clone()
            moved[..., other] += 1.0
            if other != start and (run(moved) - run(first.clone()))[start].abs() > 1e-6:
                pair.append(other - start)
    except (*Tried, StopIteration):
        return None
    style = "gptj" if pair == [1] and turned > 2 else "neox" if pair == [turned // 2] else None
    # What stands behind channels that stay is a slice of the head, which SGLang turns by itself.
    return {"head_dim": turned if start else width, "rotary_dim": turned, "style": style}


def _real(value: Any, generator: torch.Generator) -> Any:  # noqa: ANN401 - a tensor or an option
    """A tensor with values in place of one on no device; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return torch.complex(*(torch.rand(value.shape, generator=generator) + 0.1 for _ in range(2)))
    if not value.is_floating_point():
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.rand(value.shape, generator=generator) + 0.1


def routing(block: nn.Module, experts: nn.Module, hidden: int) -> Facts | None:
    """How a mixture's router chooses, found by giving its block tokens: how many experts, by which scores.

    None: the block does not run by itself, or its experts are not told which tokens they get.
    """
    watched = _watched(block, experts, hidden)
    if watched is None:
        return None
    trial, tokens, given = watched
    choice = _choice(given)
    if choice is None:
        return None
    chosen, weights = choice
    count = next(experts.parameters(recurse=False)).shape[0]
    scoring: Facts = {"scoring": None, "renormalise": None}
    for module in trial.modules():  # one of them is the router
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.shape == (count, hidden):
            seen = _scoring(tokens[0] @ weight.float().T, chosen, weights.float())
            scoring = seen if seen["scoring"] else scoring
    groups: Facts = {"groups": 1, "kept_groups": 1}  # which experts are chosen from, by the router's own fields
    for module in trial.modules():
        for fact, names in GROUPS.items():
            values = [getattr(module, name, None) for name in names]
            groups[fact] = next((value for value in values if isinstance(value, int)), groups[fact])
    return {"top_k": chosen.shape[1], **scoring, **groups}


def _choice(given: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The experts chosen and their weights, both [ROWS, top_k], among what experts were given; None: not there."""
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    chosen = next((one for one in tensors if one.dtype == torch.long), None)
    weights = next((one for one in tensors if one.is_floating_point()), None)
    if chosen is None or weights is None or chosen.shape != weights.shape or chosen.shape[0] != ROWS:
        return None
    return chosen, weights


def _watched(
    block: nn.Module, experts: nn.Module, hidden: int
) -> tuple[nn.Module, torch.Tensor, list[Any]] | None:
    """A copy of a block, filled anew, the tokens [1, ROWS, hidden] it was given, and what its experts were given.

    None: its experts are none of its own modules, or were given nothing.
    """
    given: list[Any] = []
    try:
        trial = copy.deepcopy(block)
        target = next(two for one, two in zip(block.children(), trial.children(), strict=True) if one is experts)
        own = {id(one) for one in target.modules()}
        generator = torch.Generator().manual_seed(0)
        for child in trial.modules():
            if id(child) not in own:
                _filled(child, generator)

        def record(tokens: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401
            given.extend((*rest, *named.values()))
            return torch.zeros_like(tokens)

        target.forward = record
        tokens = torch.randn(1, ROWS, hidden, generator=generator)
        with torch.no_grad():
            trial.eval()(tokens)
    except Tried:
        if not given:  # what its experts were given until then is what counts
            return None
    except StopIteration:
        return None
    return trial, tokens, given


def _filled(module: nn.Module, generator: torch.Generator) -> None:
    for name, one in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        value = torch.zeros(one.shape)
        if isinstance(one, nn.Parameter):
            if one.dim() > 1:
                value = torch.randn(one.shape, generator=generator) * 2 * one.shape[-1] ** -0.5
            setattr(module, name, nn.Parameter(value, requires_grad=False))
        else:
            module.register_buffer(name, value)


def _scoring(logits: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Facts:
    """The scores that give these weights, up to one factor of all of them."""
    for scoring, scores in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid())):
        picked = scores.gather(1, chosen)
        for renormalise in (True, False):
            ratio = weights / (picked / picked.sum(-1, keepdim=True) if renormalise else picked)
            if float((ratio / ratio.mean() - 1).abs().max()) < LOOSE:
                return {"scoring": scoring, "renormalise": renormalise}
    return {"scoring": None, "renormalise": None}


def leaf(module: nn.Module, width: int | None) -> Iterator[tuple[str, Facts]]:
    """What a module without children is, a norm or an activation; nothing: something else."""
    own = list(module.parameters(recurse=False))
    if any(one.dim() > 1 for one in own) or width is None:
        return
    if not own:
        numbers = torch.linspace(-6.0, 6.0, 3 * width).reshape(3, width)
        for name, function in ACTIVATIONS.items():
            if _alike(module, numbers, function(numbers), within=STRICT):
                yield "pointwise", {"function": name, "width": width}
                return
    yield from _norm(module, width, weighted=bool(own))


def _norm(module: nn.Module, width: int, *, weighted: bool) -> Iterator[tuple[str, Facts]]:
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(0)) + 0.5
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is not None and not isinstance(eps, float):
        return
    scaled = functional.rms_norm(rows, (width,), eps=eps)
    for weight in (1.0, 0.0):
        trial = copy.deepcopy(module)
        for name, one in list(trial.named_parameters(recurse=False)):
            value = torch.full(one.shape, weight if name == "weight" else 0.0)
            setattr(trial, name, nn.Parameter(value, requires_grad=False))
        facts = {"hidden": width, "eps": eps, "weight": weighted}
        if _alike(trial, rows, scaled):
            yield "norm", facts | {"variant": "plain" if weight or not weighted else "gemma"}
            return
        if _alike(trial, rows, functional.layer_norm(rows, (width,), eps=eps or 0.0)):
            yield "norm", facts | {"variant": "layer"}
            return


def _alike(module: nn.Module, rows: torch.Tensor, expected: torch.Tensor, within: float = LOOSE) -> bool:
    try:
        with torch.no_grad():
            out = module(rows.clone())
        return (
            isinstance(out, torch.Tensor)
            and out.shape == expected.shape
            and torch.allclose(out.float(), expected, atol=within, rtol=within)
        )
    except Tried:
        return False
